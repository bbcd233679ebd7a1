// K-quants: GGUF's Q4_K, Q5_K and Q6_K, whose scales are small integers times a half that 256
// values share.
//
//   weight = round_to_bf16(d * scale * q - dmin * min)   (Q6_K: q from -32 to 31 and no minimum)
//
// d * scale and dmin * min are exact in fp32, so is d * scale * q: rounding to fp32 and then to
// bf16 is all that is lost. A panel is 32 columns by k_pad values (a multiple of 256) in blocks of
// 256 values of K, each:
//   8 slabs of 32 values: [4][32 columns] words, the low four bits of eight values from the lowest
//     bits on; then the bits above them, [32 columns] words of one bit (Q5_K) or [2][32 columns]
//     words of two (Q6_K) for a value
//   for every group of 32 (Q6_K: 16) values: [32 columns] signed bytes of scales, then of minima
//   [32 columns] halves d, then dmin
//
// No STL: the kernels of every instruction set include this file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetero {

enum class KQuant : int { kNone, kQ4, kQ5, kQ6 };

constexpr int kSuper = 256;  // values of K in a block

// Internal linkage: kernels of every instruction set compile this.
namespace {

// What the parts of a block take and where they begin, in bytes.
struct KLayout {
  int group;  // values of K that share a scale
  bool has_min;
  size_t low = 512, high;  // of a slab
  size_t scales, supers, end;
  size_t group_bytes;  // scales and minima of one group

  explicit constexpr KLayout(KQuant kind)
      : group(kind == KQuant::kQ6 ? 16 : 32),
        has_min(kind != KQuant::kQ6),
        high(kind == KQuant::kQ4   ? 0
             : kind == KQuant::kQ5 ? 128
                                   : 256),
        scales((low + high) * 8),
        supers(scales + 32 * (has_min ? 2 : 1) * (kSuper / group)),
        end(supers + (has_min ? 128 : 64)),
        group_bytes(has_min ? 64 : 32) {}
};

[[maybe_unused]] constexpr size_t kquant_bytes(KQuant kind, int k_pad) {
  return KLayout(kind).end * static_cast<size_t>(k_pad / kSuper);
}

}  // namespace

struct CodedMatrix;

// Packs rows first..first+31 of codes: q as a byte (Q6_K: q + 32); a scale's bits are its byte and,
// above 16 bits, those of d, and so are a minimum's with dmin.
void pack_kquant(KQuant kind, const CodedMatrix& matrix, int first, std::byte* panel);

}  // namespace hetero
