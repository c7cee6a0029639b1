// The C interface. All memory is the caller's; nothing here allocates after noria_start.
//
// act is the type of activations: bf16 or fp32, as noria_act_bytes tells. T positions of S
// sequences are packed without padding. Functions that return int give 0 or a NoriaError.
#pragma once
#include <cstdint>

extern "C" {

enum NoriaError {
  NORIA_OK = 0,
  NORIA_FORKED = 1,          // the threads belong to the parent of this process
  NORIA_TOKEN_OUTSIDE = 2,   // a token id beyond the vocabulary
  NORIA_SLOT_OUTSIDE = 3,    // a slot or block beyond the cache
  NORIA_LENGTH_OUTSIDE = 4,  // a length beyond the block table, or below what is computed
};

struct NoriaCache {
  uint16_t* data;  // bf16 [layers, groups of 16 slots, kv_heads, 2 x 16 x head_dim]
  int64_t groups;
  int32_t groups_per_block, layers, kv_heads, head_dim;
};

struct NoriaBatch {
  const int64_t* token_ids;     // [T]
  const int64_t* slots;         // [T]
  const int32_t* query_start;   // [S + 1]
  const int32_t* kv_lens;       // [S]
  const int32_t* block_table;   // [S, width]
  const float* cos;             // [T, head_dim / 2]
  const float* sin;
  int32_t positions, sequences, width;
};

struct NoriaLinear {
  const uint16_t* packed;  // as in linear.h
  int32_t n, k;
};

struct NoriaLayer {
  const float* attention_norm;  // [hidden]
  const float* mlp_norm;
  const float* qkv_bias;  // [(heads + 2 kv_heads) head_dim], or null
  const float* query_norm;  // [head_dim], or null
  const float* key_norm;
  NoriaLinear qkv, out;
  NoriaLinear gate_up;  // unit u: 16 outputs of the gate, and the same 16 of up
  NoriaLinear down;
  int32_t window;  // 0: none
};

struct NoriaModel {
  int32_t vocab, hidden, layers, heads, kv_heads, head_dim, inner;
  int32_t embedding_is_packed;  // then it is the head's memory
  float eps, scale;
  const uint16_t* embedding;  // [vocab, hidden]
  const float* norm;          // [hidden]
  NoriaLinear head;
  const NoriaLayer* layer;
};

int32_t noria_act_bytes();

// Null without memory or threads; `threads` counts the caller's.
void* noria_start(int32_t threads);
void noria_stop(void* workers);

// Bytes of workspace that a step of at most `positions` needs.
int64_t noria_step_bytes(const NoriaModel* model, int32_t positions, int32_t threads);
// hidden: act [T, hidden]
int noria_step(void* workers, const NoriaModel* model, const NoriaCache* cache,
               const NoriaBatch* batch, void* workspace, void* hidden);
// hidden: act [rows, hidden]; logits: fp32 [rows, vocab]
int noria_logits(void* workers, const NoriaModel* model, const void* hidden, int32_t rows,
                 float* logits);

int64_t noria_attend_bytes(const NoriaCache* cache, int32_t heads, int32_t positions,
                           int32_t threads);
// key, value: bf16 [T, kv_heads, head_dim]
int noria_write(void* workers, const NoriaCache* cache, const NoriaBatch* batch, int32_t layer,
                const uint16_t* key, const uint16_t* value);
// queries, attended: act [T, heads, head_dim]
int noria_attend(void* workers, const NoriaCache* cache, const NoriaBatch* batch, int32_t layer,
                 int32_t heads, int32_t window, float scale, const void* queries,
                 void* workspace, void* attended);

// Asks the system to back memory that is not touched yet with huge pages.
void noria_huge_pages(void* memory, int64_t bytes);
}
