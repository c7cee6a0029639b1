// Causal attention over the paged cache.
//
// A span is up to a few positions of one sequence; with the query heads that share a KV head
// they are the rows of one item of work, so that each key and value is loaded once for all
// of them. Keys are cut at multiples of kSplit tokens: a row's softmax is formed per split,
// and splits are merged in ascending order. A row's sums therefore depend on nothing but the
// row: tokens it does not see add zeros, and cuts do not move.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "cache.h"
#include "workers.h"

namespace noria {

constexpr int kSplit = 512;
constexpr int kSplitGroups = kSplit / kGroup;
// Rows of a span: as many as reuse a key while it is near, or one position's if those are more.
constexpr int kSpanRows = 48;
constexpr int kMaxGroup = 64;
constexpr int kMaxRows = std::max(kSpanRows, kMaxGroup);

#if defined(NORIA_AVX2)
constexpr int kScoreRows = 4, kScoreGroups = 1, kMixRows = 2, kMixChunks = 1;
#elif defined(NORIA_AVX512)
constexpr int kScoreRows = 8, kScoreGroups = 4, kMixRows = 4, kMixChunks = 4;
#else
constexpr int kScoreRows = 8, kScoreGroups = 4, kMixRows = 6, kMixChunks = 4;
#endif

struct Span {
  int sequence, row, count, position;
};

struct Paging {
  const int32_t* query_start;  // [sequences + 1]
  const int32_t* kv_lens;      // [sequences]
  const int32_t* block_table;  // [sequences, width]
  int sequences, width;
};

struct Attention {
  const Cache* cache;
  const Paging* paging;
  int layer, heads, window;  // window 0: all earlier tokens are seen
  float scale;
  const act* queries;  // [T, heads, head_dim]
  act* attended;       // the same

  int group() const { return heads / cache->kv_heads; }
};

// Softmax over what was seen so far: sums [head_dim] are weighted by e^(score - peak).
struct Total {
  float* sums;
  float peak, mass;
  bool empty;
};

// One thread's memory for one split of one span, [rows] or [rows, ...] each.
struct SplitMemory {
  float* scores;  // [rows, kSplit]
  act* weights;   // [rows, kSplit]
  float* sums;    // [rows, head_dim]
  float* totals;  // [rows, head_dim]
};

static inline int rows_per_span(int group) { return std::max(kSpanRows / group, 1) * group; }

template <int Rows, int Groups>
static inline void score_rows(const bf16* const* keys, const act* const* queries, int pairs,
                              float scale, const bf16* const* next, float* scores) {
  Float c[Rows][Groups];
  for (int r = 0; r < Rows; r++)
    for (int g = 0; g < Groups; g++) c[r][g] = zero();
  for (int j = 0; j < pairs; j++) {
    Pairs k[Groups];
#pragma GCC unroll 4
    for (int g = 0; g < Groups; g++) {
      const bf16* at = keys[g] + j * 2 * kGroup;
      k[g] = load_pairs(at);
      prefetch_far(at + pairs * 2 * kGroup);
      if (next != nullptr) prefetch_far(next[g] + j * 2 * kGroup);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      Pair q = same_pair(queries[r] + 2 * j);
#pragma GCC unroll 4
      for (int g = 0; g < Groups; g++) c[r][g] = dot(c[r][g], k[g], q);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int g = 0; g < Groups; g++) {
      store(scores + r * kSplit + g * kGroup, mul(c[r][g], all(scale)));
    }
}

// Scores of `Rows` rows against groups [begin, end) of one split.
template <int Rows>
static inline void score_groups(const bf16* const* records, int begin, int end,
                                const act* const* queries, int pairs, float scale,
                                float* scores) {
  constexpr int together = Rows <= 4 ? kScoreGroups : 1;
  int g = begin;
  for (; g + together <= end; g += together) {
    const bf16* const* next = g + 2 * together <= end ? records + g + together : nullptr;
    score_rows<Rows, together>(records + g, queries, pairs, scale, next, scores + g * kGroup);
  }
  for (; g < end; g++) {
    score_rows<Rows, 1>(records + g, queries, pairs, scale, nullptr, scores + g * kGroup);
  }
}

static inline int score_some(const bf16* const* records, int begin, int end,
                             const act* const* queries, int rows, int pairs, float scale,
                             float* scores) {
#define NORIA_ROWS(count)                                                                 \
  if (count <= kScoreRows && rows >= count) {                                             \
    score_groups<std::min(count, kScoreRows)>(records, begin, end, queries, pairs, scale, \
                                              scores);                                    \
    return count;                                                                         \
  }
  NORIA_ROWS(8)
  NORIA_ROWS(6)
  NORIA_ROWS(4)
  NORIA_ROWS(3)
  NORIA_ROWS(2)
#undef NORIA_ROWS
  score_groups<1>(records, begin, end, queries, pairs, scale, scores);
  return 1;
}

// Weights of the tokens [first, end) of a split, zeros up to `groups`; their sum is `mass`.
static inline void soften(const float* scores, int first, int end, int begin, int groups,
                          act* weights, float* peak, float* mass) {
  Float unseen = all(-std::numeric_limits<float>::infinity()), most = unseen, masses = zero();
  for (int g = begin; g < groups; g++) {
    int at = g * kGroup;
    most = larger(most, within(load(scores + at), first - at, end - at, unseen));
  }
  *peak = largest(most);
  for (int g = begin; g < groups; g++) {
    int at = g * kGroup;
    Float weight = exponential(sub(load(scores + at), all(*peak)));
    weight = within(weight, first - at, end - at, zero());
    masses = add(masses, weight);
    store_act(weights + at, weight);
  }
  *mass = sum(masses);
}

// Weighted values of tokens [first, tokens) for `Rows` rows, `Chunks` x 16 channels from
// `channel` on. Other tokens are never multiplied, not even by zero: they may hold anything.
template <int Rows, int Chunks>
static inline void mix_rows(const bf16* const* records, int first, int tokens,
                            const act* weights, const Cache& cache, int channel, float* sums) {
  Float c[Rows][Chunks];
  for (int r = 0; r < Rows; r++)
    for (int i = 0; i < Chunks; i++) c[r][i] = zero();
  int pairs = (tokens + 1) / 2, last = tokens % 2 ? tokens / 2 : -1;
  int cut = first % 2 ? first / 2 : -1;
  for (int j = first / 2; j < pairs; j++) {
    const bf16* at = records[j / (kGroup / 2)] + cache.values_at() +
                     (j % (kGroup / 2) * cache.head_dim + channel) * 2;
    Pairs values[Chunks];
#pragma GCC unroll 4
    for (int i = 0; i < Chunks; i++) {
      values[i] = load_pairs(at + i * 2 * kLanes);
      if (j == last) values[i] = first_of_pairs(values[i]);
      if (j == cut) values[i] = second_of_pairs(values[i]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      Pair weight = same_pair(weights + r * kSplit + 2 * j);
#pragma GCC unroll 4
      for (int i = 0; i < Chunks; i++) c[r][i] = dot(c[r][i], values[i], weight);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int i = 0; i < Chunks; i++) {
      store(sums + r * cache.head_dim + channel + i * kLanes, c[r][i]);
    }
}

template <int Rows>
static inline void mix_channels(const bf16* const* records, int first, int tokens,
                                const act* weights, const Cache& cache, float* sums) {
  int channel = 0;
  for (; channel + kMixChunks * kLanes <= cache.head_dim; channel += kMixChunks * kLanes) {
    mix_rows<Rows, kMixChunks>(records, first, tokens, weights, cache, channel, sums);
  }
  for (; channel < cache.head_dim; channel += kLanes) {
    mix_rows<Rows, 1>(records, first, tokens, weights, cache, channel, sums);
  }
}

static inline int mix_some(const bf16* const* records, int first, int tokens, const act* weights,
                           int rows, const Cache& cache, float* sums) {
#define NORIA_ROWS(count)                                                                   \
  if (count <= kMixRows && rows >= count) {                                                 \
    mix_channels<std::min(count, kMixRows)>(records, first, tokens, weights, cache, sums);  \
    return count;                                                                           \
  }
  NORIA_ROWS(6)
  NORIA_ROWS(4)
  NORIA_ROWS(3)
  NORIA_ROWS(2)
#undef NORIA_ROWS
  mix_channels<1>(records, first, tokens, weights, cache, sums);
  return 1;
}

static inline void merge(Total& total, const float* sums, float peak, float mass, int head_dim) {
  float old_factor = 0.f, factor = 1.f;
  if (!total.empty) {
    float highest = std::max(total.peak, peak);
    old_factor = exponential(total.peak - highest);
    factor = exponential(peak - highest);
    for (int i = 0; i < head_dim; i += kLanes) {
      Float old = mul(load(total.sums + i), all(old_factor));
      store(total.sums + i, fma(load(sums + i), all(factor), old));
    }
    total.mass = std::fma(mass, factor, total.mass * old_factor);
    total.peak = highest;
    return;
  }
  std::copy(sums, sums + head_dim, total.sums);
  total.mass = mass;
  total.peak = peak;
  total.empty = false;
}

static inline void finish(const Total& total, act* attended, int head_dim) {
  for (int i = 0; i < head_dim; i += kLanes) {
    store_act(attended + i, div(load(total.sums + i), all(total.mass)));
  }
}

// The first token that a position sees; the last is the position itself.
static inline int first_seen(const Attention& a, int position) {
  return a.window > 0 ? std::max(position + 1 - a.window, 0) : 0;
}

// One split of one span: sums into memory.sums, peaks and masses [rows].
static inline void attend_split(const Attention& a, const Span& span, int head, int split,
                                const SplitMemory& memory, float* peaks, float* masses) {
  const Cache& cache = *a.cache;
  int group = a.group(), rows = span.count * group, start = split * kSplit;
  int tokens = std::min(span.position + span.count - start, kSplit);
  int earliest = std::max(first_seen(a, span.position) - start, 0), begin = earliest / kGroup;
  int groups = (tokens + kGroup - 1) / kGroup, per_block = cache.groups_per_block;
  const int32_t* table = a.paging->block_table + static_cast<long>(span.sequence) * a.paging->width;
  const bf16* records[kSplitGroups];
  for (int g = begin; g < groups; g++) {
    int at = split * kSplitGroups + g;
    long cached = static_cast<long>(table[at / per_block]) * per_block + at % per_block;
    records[g] = cache.record(a.layer, cached, head);
  }
  auto query = [&](int r) {
    long row = span.row + r / group;
    return a.queries + (row * a.heads + head * group + r % group) * cache.head_dim;
  };
  for (int r = 0, done; r < rows; r += done) {
    const act* queries[kScoreRows];
    for (int i = 0; i < std::min(kScoreRows, rows - r); i++) queries[i] = query(r + i);
    done = score_some(records, begin, groups, queries, rows - r, cache.head_dim / 2, a.scale,
                      memory.scores + r * kSplit);
  }
  for (int r = 0; r < rows; r++) {
    int position = span.position + r / group;
    int first = std::max(first_seen(a, position) - start, 0);
    int end = std::min(position + 1 - start, kSplit);
    soften(memory.scores + r * kSplit, first, end, begin, groups, memory.weights + r * kSplit,
           peaks + r, masses + r);
  }
  for (int r = 0, done; r < rows; r += done) {
    done = mix_some(records, earliest, tokens, memory.weights + r * kSplit, rows - r, cache,
                    memory.sums + r * cache.head_dim);
  }
}

static inline bool sees(const Attention& a, int position, int split) {
  return position >= split * kSplit && first_seen(a, position) < (split + 1) * kSplit;
}

static inline int first_split(const Attention& a, const Span& span) {
  return first_seen(a, span.position) / kSplit;
}

static inline int end_split(const Span& span) { return (span.position + span.count - 1) / kSplit + 1; }

static inline act* attended_at(const Attention& a, const Span& span, int head, int r) {
  long row = span.row + r / a.group();
  return a.attended + (row * a.heads + head * a.group() + r % a.group()) * a.cache->head_dim;
}

// All splits of one span, one after the other.
static inline void attend_span(const Attention& a, const Span& span, int head,
                               const SplitMemory& memory) {
  int rows = span.count * a.group(), head_dim = a.cache->head_dim;
  Total totals[kMaxRows];
  float peaks[kMaxRows], masses[kMaxRows];
  for (int r = 0; r < rows; r++) totals[r] = {memory.totals + r * head_dim, 0.f, 0.f, true};
  for (int split = first_split(a, span); split < end_split(span); split++) {
    attend_split(a, span, head, split, memory, peaks, masses);
    for (int r = 0; r < rows; r++) {
      if (!sees(a, span.position + r / a.group(), split)) continue;
      merge(totals[r], memory.sums + r * head_dim, peaks[r], masses[r], head_dim);
    }
  }
  for (int r = 0; r < rows; r++) finish(totals[r], attended_at(a, span, head, r), head_dim);
}

// Each split's sums, peaks and masses of spans of one position, until they are merged:
// [span, KV head, split], each [group, head_dim + 2].
struct Partials {
  float* data;
  int splits;

  float* at(const Attention& a, int span, int head, int split) const {
    long index = (static_cast<long>(span) * a.cache->kv_heads + head) * splits + split;
    return data + index * a.group() * (a.cache->head_dim + 2);
  }
};

static inline void attend_part(const Attention& a, const Span& span, int head, int split,
                               SplitMemory memory, float* partial) {
  int group = a.group();
  memory.sums = partial + 2 * group;
  attend_split(a, span, head, split, memory, partial, partial + group);
}

static inline void merge_parts(const Attention& a, const Span& span, int index, int head,
                               const Partials& partials, const SplitMemory& memory) {
  int group = a.group(), head_dim = a.cache->head_dim;
  for (int r = 0; r < group; r++) {
    Total total{memory.totals, 0.f, 0.f, true};
    for (int split = first_split(a, span); split < end_split(span); split++) {
      const float* partial = partials.at(a, index, head, split);
      merge(total, partial + 2 * group + r * head_dim, partial[r], partial[group + r], head_dim);
    }
    finish(total, attended_at(a, span, head, r), head_dim);
  }
}

// Cuts a batch into spans, the longest work first; how many there are. With `spans` null
// they are only counted.
static inline int cut(const Paging& paging, int group, Span* spans) {
  int positions = rows_per_span(group) / group, count = 0;
  for (int s = paging.sequences - 1; s >= 0; s--) {
    int start = paging.query_start[s], rows = paging.query_start[s + 1] - start;
    int before = paging.kv_lens[s] - rows;
    for (int at = (rows - 1) / positions * positions; at >= 0; at -= positions) {
      int size = std::min(positions, rows - at);
      if (spans != nullptr) spans[count] = {s, start + at, size, before + at};
      count++;
    }
  }
  return count;
}

// What one batch's attention needs, shared by its layers.
struct AttentionPlan {
  Span* spans;
  int count;
  Partials partials;  // splits 0: every span does all its splits itself
  SplitMemory* memory;  // [threads]
};

static inline void attend(Workers& workers, const Attention& a, const AttentionPlan& plan) {
  int kv_heads = a.cache->kv_heads, splits = plan.partials.splits;
  if (splits == 0) {
    workers.uneven(plan.count * kv_heads, [&](int item, int thread) {
      attend_span(a, plan.spans[item / kv_heads], item % kv_heads, plan.memory[thread]);
    });
    return;
  }
  workers.uneven(plan.count * kv_heads * splits, [&](int item, int thread) {
    int split = item % splits, head = item / splits % kv_heads, index = item / splits / kv_heads;
    const Span& span = plan.spans[index];
    if (split < first_split(a, span) || split >= end_split(span)) return;
    attend_part(a, span, head, split, plan.memory[thread], plan.partials.at(a, index, head, split));
  });
  workers.even(plan.count * kv_heads, [&](int item, int thread) {
    int index = item / kv_heads, head = item % kv_heads;
    merge_parts(a, plan.spans[index], index, head, plan.partials, plan.memory[thread]);
  });
}

}  // namespace noria
