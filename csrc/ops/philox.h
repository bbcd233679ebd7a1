// Philox 4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3" (SC 2011).
#pragma once

#include <cstdint>

namespace hetero {

struct Random128 {
  uint64_t low = 0, high = 0;
};

inline Random128 philox(Random128 counter, uint64_t key) {
  uint32_t c0 = static_cast<uint32_t>(counter.low), c1 = static_cast<uint32_t>(counter.low >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter.high), c3 = static_cast<uint32_t>(counter.high >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0 | static_cast<uint64_t>(c1) << 32, c2 | static_cast<uint64_t>(c3) << 32};
}

// The uniform number in (0, 1) of a token. Two rounds, so that every bit of the four words counts.
inline double uniform(const uint64_t key[4]) {
  const Random128 stream = philox({key[1], key[2]}, key[0]);
  const Random128 bits = philox({key[3], stream.high}, stream.low);
  return (static_cast<double>(bits.low >> 12) + 0.5) * 0x1p-52;
}

}  // namespace hetero
