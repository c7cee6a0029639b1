// x W^T for weights packed once.
//
// W [n, k] lies as panels of 16 outputs: panel p, pair j holds W[16p + lane, 2j] and
// W[16p + lane, 2j + 1] in lane `lane`. One item of work is a unit of two panels over a
// block of rows. An output is a sum over k in ascending order whatever the number of rows.
#pragma once
#include <algorithm>

#include "simd.h"
#include "workers.h"

namespace noria {

#if defined(NORIA_AVX2)
constexpr int kTileRows = 2, kTilePanels = 1;
#elif defined(NORIA_AVX512)
constexpr int kTileRows = 12, kTilePanels = 2;
#else
constexpr int kTileRows = 12, kTilePanels = 2;
#endif
constexpr int kUnit = 2 * kLanes;
// Rows per item: enough to reuse a unit's weights, few enough to give every thread items.
constexpr int kRowBlock = 96;
constexpr int kPrefetchPairs = 64;

struct Linear {
  const bf16* packed;
  int n, k;
};

// Sums of `Rows` rows over `Panels` panels that lie `panel` elements apart.
template <int Rows, int Panels, bool Prefetch>
static inline void tile(const bf16* w, long panel, const act* x, long row, int pairs,
                        Float (*sums)[2]) {
  Float c[Rows][Panels];
  for (int r = 0; r < Rows; r++)
    for (int p = 0; p < Panels; p++) c[r][p] = zero();
  for (int j = 0; j < pairs; j++) {
    Pairs weights[Panels];
#pragma GCC unroll 2
    for (int p = 0; p < Panels; p++) {
      const bf16* at = w + p * panel + j * kUnit;
      weights[p] = load_pairs(at);
      if (Prefetch) prefetch(at + kPrefetchPairs * kUnit);
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; r++) {
      Pair both = same_pair(x + r * row + 2 * j);
#pragma GCC unroll 2
      for (int p = 0; p < Panels; p++) c[r][p] = dot(c[r][p], weights[p], both);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int p = 0; p < Panels; p++) sums[r][p] = c[r][p];
}

template <int Rows, bool Prefetch>
static inline void unit_of_rows(const bf16* w, long panel, const act* x, long row, int pairs,
                                Float (*sums)[2]) {
  if (kTilePanels == 2) {
    tile<Rows, 2, Prefetch>(w, panel, x, row, pairs, sums);
    return;
  }
  for (int p = 0; p < 2; p++) {
    Float one[Rows][2];
    tile<Rows, 1, Prefetch>(w + p * panel, panel, x, row, pairs, one);
    for (int r = 0; r < Rows; r++) sums[r][p] = one[r][0];
  }
}

template <bool Prefetch>
static inline int some_rows(const bf16* w, long panel, const act* x, long row, int pairs, int rows,
                            Float (*sums)[2]) {
#define NORIA_ROWS(count)                                                    \
  if (count <= kTileRows && rows >= count) {                                 \
    unit_of_rows<std::min(count, kTileRows), Prefetch>(w, panel, x, row, pairs, sums); \
    return count;                                                            \
  }
  NORIA_ROWS(12)
  NORIA_ROWS(8)
  NORIA_ROWS(4)
  NORIA_ROWS(2)
#undef NORIA_ROWS
  unit_of_rows<1, Prefetch>(w, panel, x, row, pairs, sums);
  return 1;
}

// finish(row, unit, first, second) gets the two panels' 16 outputs each of every row of x.
template <class Finish>
void multiply(Workers& workers, const Linear& linear, const act* x, int rows,
              const Finish& finish) {
  int blocks = (rows + kRowBlock - 1) / kRowBlock;
  long panel = static_cast<long>(linear.k) * kLanes;
  workers.even(linear.n / kUnit * blocks, [&](int item, int) {
    int unit = item / blocks, begin = item % blocks * kRowBlock;
    int end = std::min(begin + kRowBlock, rows);
    const bf16* w = linear.packed + 2 * unit * panel;
    Float sums[kTileRows][2];
    for (int at = begin, done; at < end; at += done) {
      const act* first = x + static_cast<long>(at) * linear.k;
      done = at == begin
                 ? some_rows<true>(w, panel, first, linear.k, linear.k / 2, end - at, sums)
                 : some_rows<false>(w, panel, first, linear.k, linear.k / 2, end - at, sums);
      for (int r = 0; r < done; r++) finish(at + r, unit, sums[r][0], sums[r][1]);
    }
  });
}

}  // namespace noria
