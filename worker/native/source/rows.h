// What is done to each row by itself: norms, rotary embedding, SwiGLU.
#pragma once
#include <cmath>

#include "cache.h"
#include "simd.h"

namespace noria {

// x [size] over its root mean square, times weight [size] (Zhang and Sennrich 2019).
template <class Store>
static inline void rms_norm(const float* x, const float* weight, int size, float eps,
                            const Store& store_at) {
  Float squares = zero();
  for (int i = 0; i < size; i += kLanes) {
    Float v = load(x + i);
    squares = fma(v, v, squares);
  }
  Float scale = all(1.f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
  for (int i = 0; i < size; i += kLanes) {
    store_at(i, mul(mul(load(x + i), scale), load(weight + i)));
  }
}

// Turns pairs (i, i + head_dim / 2) by angles given as cos and sin [head_dim / 2] (Su et al.
// 2021). In place.
static inline void rotate(float* head, const float* cos, const float* sin, int head_dim) {
  int half = head_dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    Float a = load(head + i), b = load(head + half + i);
    Float c = load(cos + i), s = load(sin + i);
    store(head + i, sub(mul(a, c), mul(b, s)));
    store(head + half + i, add(mul(b, c), mul(a, s)));
  }
}

// SiLU of the gate, times up (Shazeer 2020).
static inline Float silu_mul(Float gate, Float up) {
  Float denominator = add(all(1.f), exponential(sub(zero(), gate)));
  return mul(div(gate, denominator), up);
}

}  // namespace noria
