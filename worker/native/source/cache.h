// Where keys and values lie.
//
// Slots form groups of 16. A record holds one group of one KV head: keys as pairs along the
// head, [head_dim / 2][16 tokens][2], then values as pairs of tokens, [8][head_dim][2].
#pragma once
#include "simd.h"

namespace noria {

constexpr int kGroup = kLanes;

struct Cache {
  bf16* data;
  long groups;
  int groups_per_block, layers, kv_heads, head_dim;

  bf16* record(int layer, long group, int head) const {
    long index = (layer * groups + group) * kv_heads + head;
    return data + index * (2L * kGroup * head_dim);
  }
  long values_at() const { return static_cast<long>(kGroup) * head_dim; }
};

// One token's key and value of one head, [head_dim] each, into a slot.
static inline void write_token(const Cache& cache, int layer, int head, long slot, const bf16* key,
                               const bf16* value) {
  int place = static_cast<int>(slot % kGroup);
  bf16* record = cache.record(layer, slot / kGroup, head);
  for (int i = 0; i < cache.head_dim / 2; i++) {
    std::memcpy(record + (i * kGroup + place) * 2, key + 2 * i, 2 * sizeof(bf16));
  }
  bf16* values = record + cache.values_at() + (place / 2) * 2 * cache.head_dim + place % 2;
  for (int i = 0; i < cache.head_dim; i++) values[2 * i] = value[i];
}

}  // namespace noria
