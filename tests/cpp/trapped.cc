// Runs the tile and bf16 instructions on a processor that lacks them: each of them raises SIGILL,
// and the handler does by hand what the instruction would have done to the thread. Built into the
// extension with -DHETERO_TRAPPED=ON (`make trapped`), it executes the very objects that run on AMX
// and AVX512-BF16: encodings, operand order, tile shapes, strides, configuration per thread.
//
// Written from the pseudo-code of Intel's manual (SDM volume 2: LDTILECFG, TILELOADD, TDPBF16PS,
// VDPBF16PS), not from kernels/amx_emulated.h, so that one checks the other. Anything that the
// processor would refuse stops the program, as does every other instruction that it lacks.

#include <cpuid.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace {

[[noreturn]] void refuse(const uint8_t* code, const char* why) {
  std::fprintf(stderr, "trapped instruction at %p: %s:", static_cast<const void*>(code), why);
  for (int i = 0; i < 12; ++i) std::fprintf(stderr, " %02x", code[i]);
  std::fprintf(stderr, "\n");
  abort();
}

float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return flush(x);
}
float multiply_add(float x, uint16_t a, uint16_t b) {
  return flush(std::fma(from_bf16(a), from_bf16(b), flush(x)));
}

// ---- the thread: what the kernel saved of it

constexpr int kGeneral[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                              REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                              REG_R12, REG_R13, REG_R14, REG_R15};

// One register of 512 bits in an XSAVE area of the standard format (SDM volume 1, chapter 13).
class Vector {
 public:
  Vector(ucontext_t* context, int number)
      : area_(reinterpret_cast<uint8_t*>(context->uc_mcontext.fpregs)), number_(number) {}

  void read(uint8_t* to) const {
    for_each([&](int component, uint8_t* part, int offset, int bytes) {
      if ((present() >> component) & 1)
        std::memcpy(to + offset, part, bytes);
      else
        std::memset(to + offset, 0, bytes);
    });
  }
  void write(const uint8_t* from) {
    for_each([&](int component, uint8_t* part, int offset, int bytes) {
      if (!((present() >> component) & 1)) {  // all other registers of the component are zero
        std::memset(start(component), 0, extent(component));
        present() |= uint64_t{1} << component;
      }
      std::memcpy(part, from + offset, bytes);
    });
  }

 private:
  enum { kSse = 1, kAvx = 2, kUpperHalves = 6, kUpperRegisters = 7 };

  uint64_t& present() const { return *reinterpret_cast<uint64_t*>(area_ + 512); }
  static uint32_t layout(int component, bool offset) {
    uint32_t a, b, c, d;
    __cpuid_count(0xd, component, a, b, c, d);
    return offset ? b : a;
  }
  uint8_t* start(int component) const {
    static const uint32_t offsets[] = {layout(kAvx, true), layout(kUpperHalves, true),
                                       layout(kUpperRegisters, true)};
    if (component == kSse) return area_ + 160;
    return area_ + offsets[component == kAvx ? 0 : component - kUpperHalves + 1];
  }
  static int extent(int component) {
    return component <= kAvx ? 256 : component == kUpperHalves ? 512 : 1024;
  }
  template <typename F>
  void for_each(F&& f) const {
    if (number_ >= 16) {
      f(kUpperRegisters, start(kUpperRegisters) + 64 * (number_ - 16), 0, 64);
      return;
    }
    f(kSse, start(kSse) + 16 * number_, 0, 16);
    f(kAvx, start(kAvx) + 16 * number_, 16, 16);
    f(kUpperHalves, start(kUpperHalves) + 32 * number_, 32, 32);
  }

  uint8_t* area_;
  int number_;
};

struct Tiles {
  bool configured;
  uint8_t rows[8];
  uint16_t row_bytes[8];
  uint8_t data[8][16][64];
};

// The calling thread's. By thread id: a handler may not touch a library's thread_local, which is
// allocated at the first touch.
Tiles& tiles() {
  constexpr int kMostThreads = 256;
  static std::atomic<pid_t> owners[kMostThreads];
  static Tiles all[kMostThreads];
  const pid_t self = static_cast<pid_t>(syscall(SYS_gettid));
  for (int slot = 0; slot < kMostThreads; ++slot) {
    if (owners[slot] == self) return all[slot];
  }
  for (int slot = 0; slot < kMostThreads; ++slot) {
    pid_t owner = owners[slot];
    const bool ended = owner != 0 && syscall(SYS_tgkill, getpid(), owner, 0) != 0;
    if ((owner == 0 || ended) && owners[slot].compare_exchange_strong(owner, self)) {
      all[slot].configured = false;
      return all[slot];
    }
  }
  abort();
}

// ---- instructions

struct Instruction {
  const uint8_t* code;
  int length = 0;
  bool evex = false, broadcast = false;
  int prefix = 0, opcode = 0;       // prefix: 0 none, 1 66, 2 F3, 3 F2
  int reg = 0, middle = 0, rm = 0;  // registers of ModRM.reg, VVVV and ModRM.rm
  bool memory = false;
  uint64_t address = 0;  // where memory is an operand
  int64_t stride = 0;    // the index register of a tile's address, scaled
};

// ModRM, SIB and displacement after the opcode. `unit` scales a displacement of one byte (EVEX).
void decode_operand(Instruction& i, int at, bool x, bool b, const ucontext_t* context, int unit) {
  const auto general = [&](int n) {
    return static_cast<uint64_t>(context->uc_mcontext.gregs[kGeneral[n]]);
  };
  const uint8_t modrm = i.code[at++];
  const int mod = modrm >> 6, rm = modrm & 7;
  i.reg |= (modrm >> 3) & 7;
  i.memory = mod != 3;
  if (!i.memory) {
    i.rm = rm | (b ? 8 : 0) | (i.evex && x ? 16 : 0);
    i.length = at;
    return;
  }
  bool no_base = mod == 0 && rm == 5;
  const bool from_here = no_base;
  uint64_t address = no_base ? 0 : rm == 4 ? 0 : general(rm | (b ? 8 : 0));
  if (rm == 4) {
    const uint8_t sib = i.code[at++];
    const int index = ((sib >> 3) & 7) | (x ? 8 : 0), base = sib & 7;
    if (index != 4) i.stride = static_cast<int64_t>(general(index) << (sib >> 6));
    no_base = mod == 0 && base == 5;
    if (!no_base) address = general(base | (b ? 8 : 0));
  }
  if (mod == 1) {
    address += static_cast<int64_t>(static_cast<int8_t>(i.code[at++])) * unit;
  } else if (mod == 2 || no_base) {
    int32_t displacement;
    std::memcpy(&displacement, i.code + at, 4);
    at += 4;
    address += static_cast<int64_t>(displacement);
  }
  i.length = at;
  i.address = from_here ? address + reinterpret_cast<uint64_t>(i.code + at) : address;
}

// False when the bytes are no instruction of the map 0F38 in VEX or EVEX.
bool decode(const uint8_t* code, const ucontext_t* context, Instruction& i) {
  i.code = code;
  if (code[0] == 0xc4 && (code[1] & 0x1f) == 2) {
    if (code[2] & 0x84) return false;  // W1 or 256 bits: neither exists among these
    i.prefix = code[2] & 3;
    i.middle = ~(code[2] >> 3) & 15;
    i.opcode = code[3];
    i.reg = code[1] & 0x80 ? 0 : 8;
    decode_operand(i, 4, !(code[1] & 0x40), !(code[1] & 0x20), context, 1);
    return true;
  }
  if (code[0] == 0x62 && (code[1] & 7) == 2) {
    i.evex = true;
    i.prefix = code[2] & 3;
    i.middle = (~(code[2] >> 3) & 15) | (code[3] & 8 ? 0 : 16);
    i.broadcast = code[3] & 0x10;
    i.opcode = code[4];
    i.reg = (code[1] & 0x80 ? 0 : 8) | (code[1] & 0x10 ? 0 : 16);
    if (i.opcode != 0x52 || i.prefix != 2) return false;
    if ((code[3] & 0x60) != 0x40 || (code[3] & 0x87) || (code[2] & 0x80)) {
      refuse(code, "only 512 bits without a mask are written by hand");
    }
    decode_operand(i, 5, !(code[1] & 0x40), !(code[1] & 0x20), context, i.broadcast ? 4 : 64);
    return true;
  }
  return false;
}

// VDPBF16PS zmm1, zmm2, zmm3/m512/m32bcst: the odd products first, then the even ones.
void dot_vector(const Instruction& i, ucontext_t* context) {
  alignas(64) float sum[16];
  alignas(64) uint16_t a[32], b[32];
  Vector target(context, i.reg);
  target.read(reinterpret_cast<uint8_t*>(sum));
  Vector(context, i.middle).read(reinterpret_cast<uint8_t*>(a));
  const uint64_t address = i.address + static_cast<uint64_t>(i.stride);
  if (!i.memory) {
    Vector(context, i.rm).read(reinterpret_cast<uint8_t*>(b));
  } else if (i.broadcast) {
    for (int lane = 0; lane < 16; ++lane)
      std::memcpy(b + 2 * lane, reinterpret_cast<void*>(address), 4);
  } else {
    std::memcpy(b, reinterpret_cast<void*>(address), 64);
  }
  for (int lane = 0; lane < 16; ++lane) {
    sum[lane] = multiply_add(sum[lane], a[2 * lane + 1], b[2 * lane + 1]);
    sum[lane] = multiply_add(sum[lane], a[2 * lane], b[2 * lane]);
  }
  target.write(reinterpret_cast<const uint8_t*>(sum));
}

void configure(const Instruction& i) {
  const uint8_t* from =
      reinterpret_cast<const uint8_t*>(i.address + static_cast<uint64_t>(i.stride));
  Tiles& t = tiles();
  std::memset(&t, 0, sizeof(t));
  if (from[0] == 0) return;
  bool good = from[0] == 1;
  for (int at = 2; at < 16; ++at) good &= from[at] == 0;
  for (int at = 32; at < 48; ++at) good &= from[at] == 0;
  for (int at = 56; at < 64; ++at) good &= from[at] == 0;
  for (int tile = 0; tile < 8; ++tile) {
    std::memcpy(&t.row_bytes[tile], from + 16 + 2 * tile, 2);
    t.rows[tile] = from[48 + tile];
    good &= t.rows[tile] <= 16 && t.row_bytes[tile] <= 64 &&
            (t.rows[tile] == 0) == (t.row_bytes[tile] == 0);
  }
  if (!good || from[1] != 0) refuse(i.code, "a tile configuration that the processor refuses");
  t.configured = true;
}

// TDPBF16PS: even and odd products of a row are summed apart, then together, then to the target.
void dot_tiles(const Instruction& i) {
  Tiles& t = tiles();
  const int c = i.reg, a = i.rm, b = i.middle;
  const bool differ = c != a && c != b && a != b;
  if (!differ || t.row_bytes[c] != t.row_bytes[b] || t.row_bytes[a] != 4 * t.rows[b] ||
      t.rows[c] != t.rows[a]) {
    refuse(i.code, "tiles whose shapes do not go together");
  }
  for (int row = 0; row < t.rows[c]; ++row) {
    for (int column = 0; column < t.row_bytes[c] / 4; ++column) {
      float even = 0.0f, odd = 0.0f, sum;
      for (int pair = 0; pair < t.row_bytes[a] / 4; ++pair) {
        uint16_t x[2], y[2];
        std::memcpy(x, &t.data[a][row][4 * pair], 4);
        std::memcpy(y, &t.data[b][pair][4 * column], 4);
        even = multiply_add(even, x[0], y[0]);
        odd = multiply_add(odd, x[1], y[1]);
      }
      std::memcpy(&sum, &t.data[c][row][4 * column], 4);
      sum = flush(flush(sum) + flush(even + odd));
      std::memcpy(&t.data[c][row][4 * column], &sum, 4);
    }
  }
}

void move_tile(const Instruction& i, bool store) {
  Tiles& t = tiles();
  for (int row = 0; row < 16; ++row) {
    uint8_t* memory = reinterpret_cast<uint8_t*>(i.address + static_cast<uint64_t>(row * i.stride));
    uint8_t* own = t.data[i.reg][row];
    const int bytes = row < t.rows[i.reg] ? t.row_bytes[i.reg] : 0;
    if (store) {
      std::memcpy(memory, own, bytes);
    } else {
      std::memcpy(own, memory, bytes);
      std::memset(own + bytes, 0, 64 - bytes);
    }
  }
}

// False when it is none of these.
bool execute(const Instruction& i, ucontext_t* context) {
  if (i.evex) {
    dot_vector(i, context);
    return true;
  }
  const int what = i.opcode << 2 | i.prefix;
  const bool setting = what == (0x49 << 2) && i.reg == 0;
  if (setting && i.memory) {
    configure(i);
    return true;
  }
  if (setting && i.rm == 0) {
    std::memset(&tiles(), 0, sizeof(Tiles));
    return true;
  }
  const bool zero = what == (0x49 << 2 | 3) && !i.memory,
             dot = what == (0x5c << 2 | 2) && !i.memory;
  const bool load = what == (0x4b << 2 | 3) && i.memory,
             store = what == (0x4b << 2 | 2) && i.memory;
  if (!zero && !dot && !load && !store) return false;
  if (!tiles().configured) refuse(i.code, "tiles of this thread are not configured");
  if (i.reg > 7 || (dot && (i.rm > 7 || i.middle > 7))) refuse(i.code, "there are eight tiles");
  if (zero) std::memset(tiles().data[i.reg], 0, sizeof(tiles().data[0]));
  if (dot) dot_tiles(i);
  if (load || store) move_tile(i, store);
  return true;
}

void on_illegal(int, siginfo_t*, void* raw) {
  ucontext_t* context = static_cast<ucontext_t*>(raw);
  for (bool first = true;; first = false) {  // neighbours that would trap too spare a signal each
    Instruction i;
    const uint8_t* code = reinterpret_cast<const uint8_t*>(context->uc_mcontext.gregs[REG_RIP]);
    if (!decode(code, context, i) || !execute(i, context)) {
      if (first) refuse(code, "not one that is written by hand");
      return;
    }
    context->uc_mcontext.gregs[REG_RIP] += i.length;
  }
}

[[gnu::constructor]] void install() {
  struct sigaction action = {};
  action.sa_sigaction = on_illegal;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, nullptr);
}

}  // namespace
