// Sixteen fp32 lanes, and dot products of bf16 pairs, on three instruction sets.
//
// Weights, keys and values are bf16 everywhere, stored as pairs: two neighbours along the
// summed axis form one 32-bit lane. What is multiplied with them, `act`, is bf16 where the
// CPU multiplies bf16 pairs itself and fp32 elsewhere. Each lane's sums are formed in the
// order of the calls, whatever the tiling around them: rounding never depends on the batch.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(NORIA_AVX512_BF16) + defined(NORIA_AVX512) + defined(NORIA_AVX2) != 1
#error "define one of NORIA_AVX512_BF16, NORIA_AVX512, NORIA_AVX2"
#endif

namespace noria {

using bf16 = uint16_t;
constexpr int kLanes = 16;

#if !defined(NORIA_AVX2)

using Float = __m512;

static inline Float zero() { return _mm512_setzero_ps(); }
static inline Float all(float x) { return _mm512_set1_ps(x); }
static inline Float load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
static inline Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
static inline Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
static inline Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
static inline Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
static inline Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
static inline Float larger(Float a, Float b) { return _mm512_max_ps(a, b); }
static inline Float smaller(Float a, Float b) { return _mm512_min_ps(a, b); }
static inline float sum(Float v) { return _mm512_reduce_add_ps(v); }
static inline float largest(Float v) { return _mm512_reduce_max_ps(v); }
static inline Float nearest(Float v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// 2^n of whole numbers n in [-126, 127].
static inline Float power_of_two(Float n) {
  __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}
// `value` in the lanes [first, end), `other` elsewhere.
static inline Float within(Float value, int first, int end, Float other) {
  unsigned below = end >= kLanes ? 0xffffu : end <= 0 ? 0u : (1u << end) - 1u;
  unsigned before = first >= kLanes ? 0xffffu : first <= 0 ? 0u : (1u << first) - 1u;
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(below & ~before), value);
}
static inline Float load_bf16(const bf16* p) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

#else

struct Float {
  __m256 lo, hi;
};

static inline Float zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline Float all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Float load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, Float v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
#define NORIA_BOTH_HALVES(name, op)                       \
  static inline Float name(Float a, Float b) {            \
    return {op(a.lo, b.lo), op(a.hi, b.hi)};              \
  }
NORIA_BOTH_HALVES(add, _mm256_add_ps)
NORIA_BOTH_HALVES(sub, _mm256_sub_ps)
NORIA_BOTH_HALVES(mul, _mm256_mul_ps)
NORIA_BOTH_HALVES(div, _mm256_div_ps)
NORIA_BOTH_HALVES(larger, _mm256_max_ps)
NORIA_BOTH_HALVES(smaller, _mm256_min_ps)
#undef NORIA_BOTH_HALVES
static inline Float fma(Float a, Float b, Float c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline float sum(Float v) {
  __m256 eight = _mm256_add_ps(v.lo, v.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float largest(Float v) {
  __m256 eight = _mm256_max_ps(v.lo, v.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
static inline Float nearest(Float v) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(v.lo, mode), _mm256_round_ps(v.hi, mode)};
}
static inline __m256 power_of_two_half(__m256 n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
static inline Float power_of_two(Float n) {
  return {power_of_two_half(n.lo), power_of_two_half(n.hi)};
}
static inline __m256 within_half(__m256 value, int first, int end, __m256 other) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                       _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
  return _mm256_blendv_ps(other, value, _mm256_castsi256_ps(inside));
}
static inline Float within(Float value, int first, int end, Float other) {
  return {within_half(value.lo, first, end, other.lo),
          within_half(value.hi, first - 8, end - 8, other.hi)};
}
static inline __m256 load_bf16_half(const bf16* p) {
  __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
static inline Float load_bf16(const bf16* p) { return {load_bf16_half(p), load_bf16_half(p + 8)}; }

#endif

// To the nearest, ties to even; NaN stays NaN.
static inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>(bits >> 16 | 0x40u);
  return static_cast<bf16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#if defined(NORIA_AVX512_BF16)

using act = bf16;
using Pairs = __m512bh;
using Pair = __m512bh;

static inline void store_bf16(bf16* p, Float v) {
  __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}
static inline void store_act(act* p, Float v) { store_bf16(p, v); }
static inline Float load_act(const act* p) { return load_bf16(p); }
static inline Pairs load_pairs(const bf16* p) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
}
static inline Pairs first_of_pairs(Pairs v) {
  __m512i bits = reinterpret_cast<__m512i>(v);
  return reinterpret_cast<__m512bh>(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff)));
}
static inline Pairs second_of_pairs(Pairs v) {
  __m512i bits = reinterpret_cast<__m512i>(v);
  __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return reinterpret_cast<__m512bh>(_mm512_and_si512(bits, upper));
}
static inline Pair same_pair(const act* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
}
static inline Float dot(Float c, Pairs w, Pair x) { return _mm512_dpbf16_ps(c, w, x); }

#else

using act = float;
static inline void store_act(act* p, Float v) { store(p, v); }
static inline Float load_act(const act* p) { return load(p); }

struct Pairs {
  Float first, second;
};
struct Pair {
  Float first, second;
};
static inline Pair same_pair(const act* p) { return {all(p[0]), all(p[1])}; }
static inline Pairs first_of_pairs(Pairs v) { return {v.first, zero()}; }
static inline Pairs second_of_pairs(Pairs v) { return {zero(), v.second}; }
static inline Float dot(Float c, Pairs w, Pair x) {
  return fma(w.second, x.second, fma(w.first, x.first, c));
}
static inline void store_bf16(bf16* p, Float v) {
  alignas(64) float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < kLanes; i++) p[i] = to_bf16(lanes[i]);
}
#if defined(NORIA_AVX512)
static inline Pairs load_pairs(const bf16* p) {
  __m512i bits = _mm512_loadu_si512(p);
  __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(bits, upper))};
}
#else
static inline void split_pairs(const bf16* p, __m256* first, __m256* second) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  *first = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  *second = _mm256_castsi256_ps(_mm256_and_si256(bits, upper));
}
static inline Pairs load_pairs(const bf16* p) {
  Pairs v;
  split_pairs(p, &v.first.lo, &v.second.lo);
  split_pairs(p + 16, &v.first.hi, &v.second.hi);
  return v;
}
#endif

#endif

// e^x by Cody and Waite's reduction and Cephes' polynomial; x is held within [-87, 88]. NaN
// stays NaN: of two operands, x86 passes on the second if either is.
static inline Float exponential(Float x) {
  x = smaller(all(88.f), larger(all(-87.f), x));
  Float n = nearest(mul(x, all(1.44269504f)));
  Float r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  Float p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(mul(r, r), p, add(r, all(1.f)));
  return mul(p, power_of_two(n));
}

// The same function for one number.
static inline float exponential(float x) {
  alignas(64) float lanes[kLanes];
  store(lanes, exponential(all(x)));
  return lanes[0];
}

static inline void prefetch_far(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

static inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace noria
