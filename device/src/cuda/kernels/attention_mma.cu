// Causal attention on tensor cores, for scores without a cap. Kernels by head dimension: up to 64, 128 and 256. Those
// named small are for multiprocessors with 100 KiB of shared memory.

#include "attention_mma.cuh"

KERNEL(128) attention_mma_64(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward_of<Ampere, 64>(qkv, out, lse, types, HEAD);
}
KERNEL(128) attention_mma_128(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward_of<AmpereLarge, 128>(qkv, out, lse, types, HEAD);
}
KERNEL(128) attention_mma_small_128(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward_of<AmpereSmall, 128>(qkv, out, lse, types, HEAD);
}
KERNEL(256) attention_mma_256(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward_of<AmpereWide, 256>(qkv, out, lse, types, HEAD);
}
KERNEL(128) attention_volta_64(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward_of<Volta, 64>(qkv, out, lse, types, HEAD);
}
KERNEL(128) attention_volta_128(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward_of<Volta, 128>(qkv, out, lse, types, HEAD);
}

KERNEL(128) attention_mma_queries_64(BACKWARD_PARAMETERS) { queries_of<Ampere, 64>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_mma_queries_128(BACKWARD_PARAMETERS) { queries_of<Ampere, 128>(SAVED, d_qkv, HEAD); }
KERNEL(256) attention_mma_queries_256(BACKWARD_PARAMETERS) { queries_of<AmpereWide, 256>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_mma_keys_64(BACKWARD_PARAMETERS) { keys_of<Ampere, 64>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_mma_keys_128(BACKWARD_PARAMETERS) { keys_of<AmpereLarge, 128>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_mma_small_keys_128(BACKWARD_PARAMETERS) { keys_of<AmpereSmallByKeys, 128>(SAVED, d_qkv, HEAD); }
KERNEL(256) attention_mma_keys_256(BACKWARD_PARAMETERS) { keys_of<AmpereWide, 256>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_volta_queries_64(BACKWARD_PARAMETERS) { queries_of<Volta, 64>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_volta_queries_128(BACKWARD_PARAMETERS) { queries_of<Volta, 128>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_volta_keys_64(BACKWARD_PARAMETERS) { keys_of<Volta, 64>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_volta_keys_128(BACKWARD_PARAMETERS) { keys_of<Volta, 128>(SAVED, d_qkv, HEAD); }
