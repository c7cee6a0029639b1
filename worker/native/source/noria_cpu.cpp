#include "noria_cpu.h"

#include <sys/mman.h>

#include "step.h"

namespace {

using namespace noria;

Cache opened(const NoriaCache& c) {
  return {c.data, c.groups, c.groups_per_block, c.layers, c.kv_heads, c.head_dim};
}

Paging paging_of(const NoriaBatch& b) {
  return {b.query_start, b.kv_lens, b.block_table, b.sequences, b.width};
}

int check_slots(const NoriaCache& cache, const NoriaBatch& batch) {
  for (int t = 0; t < batch.positions; t++) {
    if (batch.slots[t] < 0 || batch.slots[t] >= cache.groups * kGroup) return NORIA_SLOT_OUTSIDE;
  }
  return NORIA_OK;
}

int check_table(const NoriaCache& cache, const NoriaBatch& batch) {
  int block = cache.groups_per_block * kGroup;
  for (int s = 0; s < batch.sequences; s++) {
    long length = batch.kv_lens[s], rows = batch.query_start[s + 1] - batch.query_start[s];
    bool known = rows >= 1 && length >= rows && length <= static_cast<long>(batch.width) * block;
    if (!known) return NORIA_LENGTH_OUTSIDE;
    const int32_t* table = batch.block_table + static_cast<long>(s) * batch.width;
    for (int i = 0; i < (length + block - 1) / block; i++) {
      bool inside = table[i] >= 0 && (table[i] + 1L) * cache.groups_per_block <= cache.groups;
      if (!inside) return NORIA_SLOT_OUTSIDE;
    }
  }
  bool packed = batch.query_start[0] == 0 && batch.query_start[batch.sequences] == batch.positions;
  return packed ? NORIA_OK : NORIA_LENGTH_OUTSIDE;
}

int check_tokens(const NoriaModel& model, const NoriaBatch& batch) {
  for (int t = 0; t < batch.positions; t++) {
    if (batch.token_ids[t] < 0 || batch.token_ids[t] >= model.vocab) return NORIA_TOKEN_OUTSIDE;
  }
  return NORIA_OK;
}

}  // namespace

int32_t noria_act_bytes() { return sizeof(act); }

void* noria_start(int32_t threads) { return Workers::start(threads); }

void noria_stop(void* workers) { delete static_cast<Workers*>(workers); }

int64_t noria_step_bytes(const NoriaModel* model, int32_t positions, int32_t threads) {
  return Step(*model, positions, threads, nullptr).bytes();
}

int noria_step(void* workers, const NoriaModel* model, const NoriaCache* cache,
               const NoriaBatch* batch, void* workspace, void* hidden) {
  auto& threads = *static_cast<Workers*>(workers);
  if (!threads.usable()) return NORIA_FORKED;
  for (int error : {check_tokens(*model, *batch), check_slots(*cache, *batch),
                    check_table(*cache, *batch)}) {
    if (error != NORIA_OK) return error;
  }
  Step step(*model, batch->positions, threads.threads(), workspace);
  step.run(threads, opened(*cache), paging_of(*batch), *batch, static_cast<act*>(hidden));
  return NORIA_OK;
}

int noria_logits(void* workers, const NoriaModel* model, const void* hidden, int32_t rows,
                 float* logits) {
  auto& threads = *static_cast<Workers*>(workers);
  if (!threads.usable()) return NORIA_FORKED;
  int vocab = model->vocab;
  Linear head{model->head.packed, model->head.n, model->head.k};
  multiply(threads, head, static_cast<const act*>(hidden), rows,
           [&](int row, int unit, Float a, Float b) {
             float* at = logits + static_cast<long>(row) * vocab + unit * kUnit;
             if ((unit + 1) * kUnit <= vocab) {
               store(at, a);
               store(at + kLanes, b);
               return;
             }
             alignas(64) float both[kUnit];
             store(both, a);
             store(both + kLanes, b);
             std::copy(both, both + vocab - unit * kUnit, at);
           });
  return NORIA_OK;
}

int64_t noria_attend_bytes(const NoriaCache* cache, int32_t heads, int32_t positions,
                           int32_t threads) {
  Pieces pieces(nullptr);
  attention_memory(pieces, heads, cache->kv_heads, cache->head_dim, positions, threads, true);
  return pieces.used();
}

int noria_write(void* workers, const NoriaCache* cache, const NoriaBatch* batch, int32_t layer,
                const uint16_t* key, const uint16_t* value) {
  auto& threads = *static_cast<Workers*>(workers);
  if (!threads.usable()) return NORIA_FORKED;
  if (int error = check_slots(*cache, *batch); error != NORIA_OK) return error;
  Cache opened_cache = opened(*cache);
  for (int t = 0; t < batch->positions; t++) {
    for (int head = 0; head < cache->kv_heads; head++) {
      long at = (static_cast<long>(t) * cache->kv_heads + head) * cache->head_dim;
      write_token(opened_cache, layer, head, batch->slots[t], key + at, value + at);
    }
  }
  return NORIA_OK;
}

int noria_attend(void* workers, const NoriaCache* cache, const NoriaBatch* batch, int32_t layer,
                 int32_t heads, int32_t window, float scale, const void* queries, void* workspace,
                 void* attended) {
  auto& threads = *static_cast<Workers*>(workers);
  if (!threads.usable()) return NORIA_FORKED;
  if (int error = check_table(*cache, *batch); error != NORIA_OK) return error;
  Pieces pieces(workspace);
  AttentionMemory memory = attention_memory(pieces, heads, cache->kv_heads, cache->head_dim,
                                            batch->positions, threads.threads(), false);
  Cache opened_cache = opened(*cache);
  Paging paging = paging_of(*batch);
  AttentionPlan plan = plan_attention(memory, paging, heads, cache->kv_heads, threads.threads());
  attend(threads,
         Attention{&opened_cache, &paging, layer, heads, window, scale,
                   static_cast<const act*>(queries), static_cast<act*>(attended)},
         plan);
  return NORIA_OK;
}

void noria_huge_pages(void* memory, int64_t bytes) {
  constexpr uintptr_t huge = 2u << 20;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + huge - 1) / huge * huge;
  uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / huge * huge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}
