// One step of a Llama-shaped decoder: embedding to last norm, over packed positions.
#pragma once
#include "attention.h"
#include "linear.h"
#include "noria_cpu.h"
#include "rows.h"

namespace noria {

// Hands out aligned pieces of one block of memory, or only counts them if there is none.
class Pieces {
 public:
  explicit Pieces(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(long count) {
    char* piece = memory_ + used_;
    used_ += (count * static_cast<long>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
  long used() const { return used_; }

 private:
  char* memory_;
  long used_ = 0;
};

// Spans of single positions are computed split by split where there are few of them: in
// `kPartsPerThread` or fewer items a thread's share would be uneven.
constexpr int kPartsPerThread = 4;
constexpr int kMaxSplits = 256;

struct AttentionMemory {
  Span* spans;
  SplitMemory* memory;
  float* partials;
};

static inline AttentionMemory attention_memory(Pieces& pieces, int heads, int kv_heads,
                                               int head_dim, int positions, int threads,
                                               bool counting) {
  int group = heads / kv_heads, rows = rows_per_span(group);
  AttentionMemory m;
  m.spans = pieces.take<Span>(positions);
  m.memory = pieces.take<SplitMemory>(threads);
  for (int thread = 0; thread < threads; thread++) {
    SplitMemory own;
    own.scores = pieces.take<float>(static_cast<long>(rows) * kSplit);
    own.weights = pieces.take<act>(static_cast<long>(rows) * kSplit);
    own.sums = pieces.take<float>(static_cast<long>(rows) * head_dim);
    own.totals = pieces.take<float>(static_cast<long>(rows) * head_dim);
    if (!counting) m.memory[thread] = own;
  }
  long parts = static_cast<long>(kPartsPerThread) * threads * kMaxSplits;
  m.partials = pieces.take<float>(parts * group * (head_dim + 2));
  return m;
}

static inline AttentionPlan plan_attention(const AttentionMemory& memory, const Paging& paging,
                                           int heads, int kv_heads, int threads) {
  AttentionPlan plan{memory.spans, 0, {memory.partials, 0}, memory.memory};
  plan.count = cut(paging, heads / kv_heads, memory.spans);
  int splits = 0, longest = 0;
  for (int i = 0; i < plan.count; i++) {
    splits = std::max(splits, end_split(memory.spans[i]));
    longest = std::max(longest, memory.spans[i].count);
  }
  bool few = plan.count * kv_heads <= kPartsPerThread * threads && threads > 1;
  if (few && longest == 1 && splits > 1 && splits <= kMaxSplits) plan.partials.splits = splits;
  return plan;
}

class Step {
 public:
  // With `memory` null only bytes() may be asked for.
  Step(const NoriaModel& model, int positions, int threads, void* memory)
      : m_(model), positions_(positions), pieces_(memory) {
    long t = positions;
    hidden_ = pieces_.take<float>(t * m_.hidden);
    normed_ = pieces_.take<act>(t * m_.hidden);
    qkv_ = pieces_.take<float>(t * (m_.heads + 2 * m_.kv_heads) * m_.head_dim);
    queries_ = pieces_.take<act>(t * m_.heads * m_.head_dim);
    attended_ = pieces_.take<act>(t * m_.heads * m_.head_dim);
    inner_ = pieces_.take<act>(t * m_.inner);
    attention_ = attention_memory(pieces_, m_.heads, m_.kv_heads, m_.head_dim, positions, threads,
                                  memory == nullptr);
  }
  long bytes() const { return pieces_.used(); }

  void run(Workers& workers, const Cache& cache, const Paging& paging, const NoriaBatch& batch,
           act* hidden) {
    AttentionPlan plan =
        plan_attention(attention_, paging, m_.heads, m_.kv_heads, workers.threads());
    embed(workers, batch.token_ids);
    for (int index = 0; index < m_.layers; index++) {
      const NoriaLayer& layer = m_.layer[index];
      norm(workers, layer.attention_norm, normed_);
      project(workers, layer);
      place(workers, layer, cache, index, batch);
      attend(workers,
             Attention{&cache, &paging, index, m_.heads, layer.window, m_.scale, queries_, attended_},
             plan);
      accumulate(workers, layer.out, attended_);
      norm(workers, layer.mlp_norm, normed_);
      gate(workers, layer.gate_up);
      accumulate(workers, layer.down, inner_);
    }
    norm(workers, m_.norm, hidden);
  }

 private:
  static constexpr int kRowsTogether = 8;

  // body(row, thread) of every row; a few rows cost less than to share them would.
  template <class Body>
  void each_row(Workers& workers, const Body& body) {
    int count = (positions_ + kRowsTogether - 1) / kRowsTogether;
    workers.even(count, [&](int item, int thread) {
      int end = std::min((item + 1) * kRowsTogether, positions_);
      for (int row = item * kRowsTogether; row < end; row++) body(row, thread);
    });
  }

  void embed(Workers& workers, const int64_t* token_ids) {
    each_row(workers, [&](int row, int) {
      float* hidden = hidden_ + static_cast<long>(row) * m_.hidden;
      long id = token_ids[row];
      if (m_.embedding_is_packed) {
        const bf16* lane = m_.embedding + id / kLanes * kLanes * m_.hidden + id % kLanes * 2;
        for (int j = 0; j < m_.hidden / 2; j++) {
          for (int i = 0; i < 2; i++) {
            uint32_t bits = static_cast<uint32_t>(lane[j * 2 * kLanes + i]) << 16;
            std::memcpy(hidden + 2 * j + i, &bits, sizeof bits);
          }
        }
      } else {
        for (int i = 0; i < m_.hidden; i += kLanes) {
          store(hidden + i, load_bf16(m_.embedding + id * m_.hidden + i));
        }
      }
    });
  }

  void norm(Workers& workers, const float* weight, act* normed) {
    each_row(workers, [&](int row, int) {
      long at = static_cast<long>(row) * m_.hidden;
      rms_norm(hidden_ + at, weight, m_.hidden, m_.eps,
               [&](int i, Float v) { store_act(normed + at + i, v); });
    });
  }

  void project(Workers& workers, const NoriaLayer& layer) {
    Linear linear{layer.qkv.packed, layer.qkv.n, layer.qkv.k};
    multiply(workers, linear, normed_, positions_, [&](int row, int unit, Float a, Float b) {
      float* at = qkv_ + static_cast<long>(row) * linear.n + unit * kUnit;
      if (layer.qkv_bias != nullptr) {
        a = add(a, load(layer.qkv_bias + unit * kUnit));
        b = add(b, load(layer.qkv_bias + unit * kUnit + kLanes));
      }
      store(at, a);
      store(at + kLanes, b);
    });
  }

  // Queries turned, keys turned and written with their values.
  void place(Workers& workers, const NoriaLayer& layer, const Cache& cache, int index,
             const NoriaBatch& batch) {
    int dim = m_.head_dim;
    each_row(workers, [&](int row, int) {
      float* head = qkv_ + static_cast<long>(row) * layer.qkv.n;
      const float* cos = batch.cos + static_cast<long>(row) * (dim / 2);
      const float* sin = batch.sin + static_cast<long>(row) * (dim / 2);
      act* query = queries_ + static_cast<long>(row) * m_.heads * dim;
      for (int h = 0; h < m_.heads; h++, head += dim, query += dim) {
        turn(head, layer.query_norm, cos, sin);
        for (int i = 0; i < dim; i += kLanes) store_act(query + i, load(head + i));
      }
      const float* value = head + m_.kv_heads * dim;
      for (int h = 0; h < m_.kv_heads; h++, head += dim, value += dim) {
        turn(head, layer.key_norm, cos, sin);
        bf16 key_bits[kMaxHeadDim], value_bits[kMaxHeadDim];
        for (int i = 0; i < dim; i += kLanes) {
          store_bf16(key_bits + i, load(head + i));
          store_bf16(value_bits + i, load(value + i));
        }
        write_token(cache, index, h, batch.slots[row], key_bits, value_bits);
      }
    });
  }

  void turn(float* head, const float* weight, const float* cos, const float* sin) {
    if (weight != nullptr) {
      rms_norm(head, weight, m_.head_dim, m_.eps, [&](int i, Float v) { store(head + i, v); });
    }
    rotate(head, cos, sin, m_.head_dim);
  }

  void accumulate(Workers& workers, const NoriaLinear& weights, const act* x) {
    Linear linear{weights.packed, weights.n, weights.k};
    multiply(workers, linear, x, positions_, [&](int row, int unit, Float a, Float b) {
      float* at = hidden_ + static_cast<long>(row) * linear.n + unit * kUnit;
      store(at, add(load(at), a));
      store(at + kLanes, add(load(at + kLanes), b));
    });
  }

  void gate(Workers& workers, const NoriaLinear& weights) {
    Linear linear{weights.packed, weights.n, weights.k};
    multiply(workers, linear, normed_, positions_, [&](int row, int unit, Float a, Float b) {
      store_act(inner_ + static_cast<long>(row) * m_.inner + unit * kLanes, silu_mul(a, b));
    });
  }

  const NoriaModel& m_;
  int positions_;
  Pieces pieces_;
  float *hidden_, *qkv_;
  act *normed_, *queries_, *attended_, *inner_;
  AttentionMemory attention_;

 public:
  static constexpr int kMaxHeadDim = 512;
};

}  // namespace noria
