#include "cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hetero {
namespace {

#if defined(__x86_64__)
bool bit(uint32_t word, int index) { return (word >> index) & 1u; }

uint64_t enabled_states() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux gives the 8 KiB tile state only to processes that ask for it.
bool request_amx() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

uint32_t detect() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return kNoFeature;
  const bool has_fma = bit(c, 12) && bit(c, 29), has_osxsave = bit(c, 27);  // FMA and F16C
  if (!has_osxsave || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return kNoFeature;
  const uint64_t states = enabled_states();
  const bool ymm = (states & 0x6) == 0x6, zmm = (states & 0xe6) == 0xe6;
  const bool tiles = (states & 0x60000) == 0x60000;
  uint32_t features = kNoFeature;
  if (!ymm || !has_fma || !bit(b, 5)) return features;
  features |= kAvx2;
  if (!zmm || !bit(b, 16) || !bit(b, 17) || !bit(b, 30) || !bit(b, 31)) return features;
  features |= kAvx512;
  if (bit(c, 11)) features |= kAvx512Vnni;
#ifdef HETERO_TRAPPED
  return features | kAvx512Bf16 | kAmx;  // tests/cpp/trapped.cc does what the processor lacks
#endif
  const bool has_amx = bit(d, 22) && bit(d, 24);
  uint32_t a1 = 0;
  if (__get_cpuid_count(7, 1, &a1, &b, &c, &d) && bit(a1, 5)) features |= kAvx512Bf16;
  if ((features & kAvx512Bf16) && tiles && has_amx && request_amx()) features |= kAmx;
  return features;
}

}  // namespace

bool halves_bf16_products() {
  uint32_t a, b, c, d;
  const bool intel = __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx &&
                     c == signature_INTEL_ecx && d == signature_INTEL_edx;
  if (!intel || !__get_cpuid(1, &a, &b, &c, &d)) return false;
  constexpr uint32_t kCooperLake = 0x55;  // two full units for bf16
  const uint32_t family = (a >> 8) & 15, model = ((a >> 4) & 15) | ((a >> 12) & 0xf0);
  return !(family == 6 && model == kCooperLake);
}
#else
uint32_t detect() { return kNoFeature; }

}  // namespace

bool halves_bf16_products() { return false; }
#endif

uint32_t cpu_features() {
  static const uint32_t features = detect();
  return features;
}

}  // namespace hetero
