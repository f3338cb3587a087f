// Causal attention on tensor cores, for scores with a cap, on Ampere and later. Kernels by head dimension: up to 64, 128 and 256.
// Those named small are for multiprocessors with 100 KiB of shared memory.

#include "attention_mma.cuh"

KERNEL(128) attention_mma_capped_64(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward_of<Capped<Ampere>, 64>(qkv, out, lse, types, HEAD);
}
KERNEL(128) attention_mma_capped_128(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward_of<Capped<AmpereLarge>, 128>(qkv, out, lse, types, HEAD);
}
KERNEL(128) attention_mma_capped_small_128(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward_of<Capped<AmpereSmall>, 128>(qkv, out, lse, types, HEAD);
}
KERNEL(256) attention_mma_capped_256(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward_of<Capped<AmpereWide>, 256>(qkv, out, lse, types, HEAD);
}

KERNEL(128) attention_mma_capped_queries_64(BACKWARD_PARAMETERS) { queries_of<Capped<Ampere>, 64>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_mma_capped_queries_128(BACKWARD_PARAMETERS) { queries_of<Capped<Ampere>, 128>(SAVED, d_qkv, HEAD); }
KERNEL(256) attention_mma_capped_queries_256(BACKWARD_PARAMETERS) { queries_of<Capped<AmpereWide>, 256>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_mma_capped_keys_64(BACKWARD_PARAMETERS) { keys_of<Capped<Ampere>, 64>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_mma_capped_keys_128(BACKWARD_PARAMETERS) { keys_of<Capped<AmpereLarge>, 128>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_mma_capped_small_keys_128(BACKWARD_PARAMETERS) {
  keys_of<Capped<AmpereSmallByKeys>, 128>(SAVED, d_qkv, HEAD);
}
KERNEL(256) attention_mma_capped_keys_256(BACKWARD_PARAMETERS) { keys_of<Capped<AmpereWide>, 256>(SAVED, d_qkv, HEAD); }
