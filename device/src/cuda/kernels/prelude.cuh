// It stands before every file of kernels. NVRTC brings no headers, and none is needed. The tests
// compile the same files as C++ (ONEBOX_EMULATED): tests/fake-cuda/shim then replaces the language
// extensions and the instructions below.
//
// Compiled with --fmad=false: only fmaf fuses a product and a sum, as on the cpu backend.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef ONEBOX_EMULATED
#define KERNEL(threads) static void
#define DYNAMIC_SHARED(name) unsigned char* name = emulator::current().dynamic_shared
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#endif
#define INLINE __device__ __forceinline__

// Storage types of elements. A kernel's `types` has 4 bits per tensor (see launch.rs).
enum Type { F16, BF16, F32, F64, I32 };
INLINE u32 type_of(u32 types, int tensor) { return types >> (4 * tensor) & 15; }

#ifndef ONEBOX_EMULATED
INLINE float widen_f16(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
INLINE u16 round_f16(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
#endif

// bf16 is the upper half of an f32.
INLINE float widen_bf16(u32 x) { return __uint_as_float(x << 16); }
INLINE u16 round_bf16(float x) {
#if !defined(ONEBOX_EMULATED) && __CUDA_ARCH__ >= 800
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40);
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

// Storage types for code that knows the type at compile time.
struct OfF16 {
  typedef u16 Stored;
  static INLINE float widen(u16 x) { return widen_f16(x); }
  static INLINE u16 round(float x) { return round_f16(x); }
};
struct OfBf16 {
  typedef u16 Stored;
  static INLINE float widen(u16 x) { return widen_bf16(x); }
  static INLINE u16 round(float x) { return round_bf16(x); }
};
struct OfF32 {
  typedef float Stored;
  static INLINE float widen(float x) { return x; }
};

// Calls f with the storage type. It serves loops over rows, where a switch inside would keep loads
// from overlapping.
template <class F>
INLINE void with_type(u32 type, F f) {
  if (type == F16) f(OfF16());
  else if (type == BF16) f(OfBf16());
  else f(OfF32());
}

template <class T>
INLINE float get(const void* x, i64 i) { return T::widen(((const typename T::Stored*)x)[i]); }

INLINE float load1(const void* x, u32 type, i64 i) {
  if (type == F32) return ((const float*)x)[i];
  u16 half = ((const u16*)x)[i];
  return type == F16 ? widen_f16(half) : widen_bf16(half);
}

INLINE void store1(void* y, u32 type, i64 i, float value) {
  if (type == F32) ((float*)y)[i] = value;
  else ((u16*)y)[i] = type == F16 ? round_f16(value) : round_bf16(value);
}

INLINE bool aligned(const void* x) { return ((u64)x & 15) == 0; }

// Elements i..i+n of x, n <= 8, widened; the others become 0. It uses one wide load where alignment
// permits. The type is a kernel's argument, so all threads take the same branch.
INLINE void load8(const void* x, u32 type, i64 i, int n, float (&v)[8]) {
  if (type == F32) {
    const float* at = (const float*)x + i;
    if (n == 8 && aligned(at)) {
      float4 a = ((const float4*)at)[0], b = ((const float4*)at)[1];
      v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = j < n ? at[j] : 0.0f;
    }
    return;
  }
  const u16* at = (const u16*)x + i;
  u32 raw[4] = {0, 0, 0, 0};
  if (n == 8 && aligned(at)) {
    uint4 a = *(const uint4*)at;
    raw[0] = a.x, raw[1] = a.y, raw[2] = a.z, raw[3] = a.w;
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j < n) raw[j / 2] |= (u32)at[j] << (j % 2 * 16);
  }
#pragma unroll
  for (int j = 0; j < 8; j++) {
    u32 half = j % 2 ? raw[j / 2] >> 16 : raw[j / 2] & 0xffff;
    v[j] = type == F16 ? widen_f16((u16)half) : widen_bf16(half);
  }
}

// Eight elements as they are stored; in 16 bits the first four words. Code that fetches several runs before it widens one has
// their loads under way together; load8 takes fewer registers.
struct Raw {
  u32 words[8];
};

// Elements i..i+n of x, n <= 8; the others become 0. It uses wide loads where alignment permits. The type is a kernel's
// argument, so all threads take the same branch.
INLINE Raw fetch8(const void* x, u32 type, i64 i, int n) {
  Raw raw = {{0, 0, 0, 0, 0, 0, 0, 0}};
  const char* at = (const char*)x + i * (type == F32 ? 4 : 2);
  if (n == 8 && aligned(at)) {
    uint4 a = ((const uint4*)at)[0];
    raw.words[0] = a.x, raw.words[1] = a.y, raw.words[2] = a.z, raw.words[3] = a.w;
    if (type == F32) {
      uint4 b = ((const uint4*)at)[1];
      raw.words[4] = b.x, raw.words[5] = b.y, raw.words[6] = b.z, raw.words[7] = b.w;
    }
  } else if (type == F32) {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j < n) raw.words[j] = ((const u32*)at)[j];
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j < n) raw.words[j / 2] |= (u32)((const u16*)at)[j] << (j % 2 * 16);
  }
  return raw;
}

INLINE void widen8(const Raw& raw, u32 type, float (&v)[8]) {
  if (type == F32) {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = __uint_as_float(raw.words[j]);
  } else if (type == F16) {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = widen_f16((u16)(raw.words[j / 2] >> (j % 2 * 16)));
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = widen_bf16(raw.words[j / 2] >> (j % 2 * 16));
  }
}

// Rounds v[..n] into elements i..i+n of y.
INLINE void store8(void* y, u32 type, i64 i, int n, const float (&v)[8]) {
  if (type == F32) {
    float* at = (float*)y + i;
    if (n == 8 && aligned(at)) {
      ((float4*)at)[0] = make_float4(v[0], v[1], v[2], v[3]);
      ((float4*)at)[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j < n) at[j] = v[j];
    }
    return;
  }
  u16 half[8];
#pragma unroll
  for (int j = 0; j < 8; j++) half[j] = type == F16 ? round_f16(v[j]) : round_bf16(v[j]);
  u16* at = (u16*)y + i;
  if (n == 8 && aligned(at)) {
    *(uint4*)at = make_uint4(half[0] | (u32)half[1] << 16, half[2] | (u32)half[3] << 16,
                             half[4] | (u32)half[5] << 16, half[6] | (u32)half[7] << 16);
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j < n) at[j] = half[j];
  }
}

// Runs of 8 elements: the first run of this thread, the distance to its next run, and the number of
// the run's elements below `n`.
INLINE i64 first_run() { return 8 * ((i64)blockIdx.x * blockDim.x + threadIdx.x); }
INLINE i64 next_run() { return 8 * (i64)gridDim.x * blockDim.x; }
INLINE int run_length(i64 i, i64 n) { return n - i < 8 ? (int)(n - i) : 8; }

// e^x within 2 ulp with the cpu backend's bits: x = n ln 2 + r, a polynomial (Cephes expf) of r,
// times 2^n; 0 below the normal range, but results from e^-87.68 on are kept.
INLINE float exponential(float x) {
  const float MAGIC = 12582912.0f;
  x = x > 89.0f ? 89.0f : x;
  x = x < -88.0f ? -88.0f : x;
  float shifted = fmaf(x, 1.44269504088896340736f, MAGIC);
  float n = shifted - MAGIC;
  float r = fmaf(n, 1.9046543e-9f, fmaf(n, -0.693147180559945309417f, x));
  float p = 1.9875691e-4f;
  p = fmaf(p, r, 1.3981999e-3f);
  p = fmaf(p, r, 8.333452e-3f);
  p = fmaf(p, r, 4.1665796e-2f);
  p = fmaf(p, r, 1.6666665e-1f);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r * r, r) + 1.0f;
  u32 power = __float_as_uint(shifted) - (__float_as_uint(MAGIC) - 127u);
  return p * __uint_as_float(power << 23);
}

// 1 / (1 + e^-x) with the cpu backend's bits.
INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// 1 / x, rounded to nearest, for x from 1 to 2^100. The instruction's result is within one unit in the last place, and this step
// makes it the nearest number, as in CUDA's __frcp_rn. That function and a division also have a branch for other numbers, which
// takes registers that kernels of attention do not have.
INLINE float reciprocal(float x) {
#ifdef ONEBOX_EMULATED
  return 1.0f / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fmaf(y, fmaf(-x, y, 1.0f), y);
#endif
}

// tanh(x) with the cpu backend's bits: near 0 the polynomial of Cephes tanhf, elsewhere 1 - 2 / (e^2x + 1), which is 1 from x = 10
// on. The bound of 40 keeps e^2x in the range of `reciprocal`.
INLINE float tanh_of(float x) {
  float square = x * x;
  float p = -5.7049887e-3f;
  p = fmaf(p, square, 2.0639088e-2f);
  p = fmaf(p, square, -5.3739715e-2f);
  p = fmaf(p, square, 1.3331442e-1f);
  p = fmaf(p, square, -3.333328e-1f);
  float near = fmaf(p * square, x, x);
  float doubled = 2.0f * x;
  float far = 1.0f - 2.0f * reciprocal(exponential(doubled > 40.0f ? 40.0f : doubled) + 1.0f);
  return square < 0.390625f ? near : far;  // the square of 0.625
}

// The slope of c tanh(s / c) where tanh is `share`, at least 0: `share` may be rounded.
INLINE float slope_of_cap(float share) {
  float slope = fmaf(-share, share, 1.0f);
  return slope < 0.0f ? 0.0f : slope;
}
// The slope of c tanh(s / c) where it is `capped`, at least 0: `capped` may be rounded, or minus infinity.
INLINE float cap_slope(float capped, float cap) { return slope_of_cap(capped / cap); }

// bits32 of random.rs, bit for bit.
INLINE u32 bits32(u64 stream, u64 index) {
  u32 z = (u32)index ^ (u32)stream;
  z = (z ^ z >> 16) * 0x7feb352du;
  z = (z + (u32)(index >> 32)) ^ (u32)(stream >> 32);
  z = (z ^ z >> 15) * 0x846ca68bu;
  z = (z ^ z >> 16) * 0x21f0aaadu;
  return z ^ z >> 15;
}

// Dropout's mask. Elements below `threshold` are dropped (0: none), and kept elements are
// multiplied by `scale`.
struct Mask {
  u64 key;
  u32 threshold;
  float scale;
};
INLINE bool drops(const Mask& mask, u64 index) { return bits32(mask.key, index) < mask.threshold; }
INLINE float masked(const Mask& mask, u64 index, float x) {
  if (mask.threshold == 0) return x;
  return drops(mask, index) ? 0.0f : x * mask.scale;
}

// Combines values over the lanes whose number differs in the bits below `width`.
template <class F>
INLINE float warp_combine(float x, int width, F f) {
#pragma unroll
  for (int other = width / 2; other; other /= 2) x = f(x, __shfl_xor_sync(0xffffffffu, x, other));
  return x;
}
INLINE float plus(float a, float b) { return a + b; }
INLINE float larger(float a, float b) { return fmaxf(a, b); }

// Sum over the block, in an order that depends on its size alone. Every thread gets the result.
// `shared` may be used again only after another barrier.
INLINE float block_sum(float x, float (&shared)[32]) {
  x = warp_combine(x, 32, plus);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
  for (u32 warp = 0; warp < blockDim.x / 32; warp++) sum += shared[warp];
  return sum;
}
// The same of f, whose result does not depend on the order.
template <class F>
INLINE float block_combine(float x, float (&shared)[32], F f) {
  x = warp_combine(x, 32, f);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float all = shared[0];
  for (u32 warp = 1; warp < blockDim.x / 32; warp++) all = f(all, shared[warp]);
  return all;
}

// Attention. Blocks are (tile, head, sample).

// One head of one sample; the kernels' last parameters.
struct Head {
  u32 count;    // heads of this rank
  u32 seq_len;  // T
  u32 dim;      // D
  float scale;  // factor of q k'; usually 1 / sqrt(D)
  u64 first_mask_head;  // number of (sample 0, head 0) among all samples and heads
  u32 total;    // heads of all ranks
  Mask mask;
  u32 kv_count;  // heads of keys and values; count / kv_count heads of queries share one
  const int* starts;  // by row of all samples, where its document starts in its sample; null: at 0
  u32 window;    // keys that a query sees at most, its own among them; T without a window
  float cap;     // c: a score s becomes c tanh(s / c); 0: no cap
  u32 number;    // number of this head of queries
  u32 shared;    // number of its head of keys and values
};

INLINE i64 row_width(const Head& head) { return (i64)head.count * head.dim; }
INLINE i64 qkv_width(const Head& head) { return (head.count + 2 * head.kv_count) * head.dim; }
INLINE u32 group_size(const Head& head) { return head.count / head.kv_count; }
// Index of element (token, 0) of a head in (B T, H D), and of its q (0), k (1) or v (2) in (B T, (H
// + 2 K) D).
INLINE i64 at_row(const Head& head, i64 token) {
  return ((i64)blockIdx.z * head.seq_len + token) * row_width(head) + (i64)head.number * head.dim;
}
INLINE i64 at_qkv(const Head& head, i64 token, int part) {
  // 32 bits suffice: no row is longer, and no micro-batch has more tokens.
  u32 column = (part == 0 ? head.number : head.count + (part - 1) * head.kv_count + head.shared) * head.dim;
  return (i64)(blockIdx.z * head.seq_len + (u32)token) * qkv_width(head) + column;
}
// Index of (sample, head, token) in lse.
INLINE i64 at_lse(const Head& head, i64 token) {
  return ((i64)blockIdx.z * head.count + head.number) * head.seq_len + token;
}
INLINE u64 mask_index(const Head& head, u32 query, u32 key) {
  u64 number = head.first_mask_head + (u64)blockIdx.z * head.total + head.number;
  return (number * head.seq_len + query) * head.seq_len + key;
}

// What makes a product q k' the argument of the cap's tanh.
INLINE float inner_of_cap(const Head& head) { return head.scale / head.cap; }

INLINE float finite_or_zero(float x) { return x == -__int_as_float(0x7f800000) ? 0.0f : x; }

// The first key that a token sees: where its document starts in its sample or, if that is later, its window. Of tokens after the
// last only that it is at least 0.
INLINE int start_of(const Head& head, int token) {
  int start = head.starts && token < (int)head.seq_len ? head.starts[blockIdx.z * head.seq_len + (u32)token] : 0;
  int of_window = token + 1 - (int)head.window;
  return start > of_window ? start : of_window;
}

// Inputs of the backward kernels.
struct Saved {
  const void *qkv, *d_out;
  const float *lse, *delta;
  u32 types;  // types of qkv, out, d_out, d_qkv
};

#define HEAD_PARAMETERS                                                                                          \
  u32 count, u32 seq_len, u32 dim, float scale, u64 first_mask_head, u32 total, u64 key, u32 threshold,          \
      float mask_scale, u32 kv_count, const int *starts, u32 window, float cap
#define HEAD \
  { count, seq_len, dim, scale, first_mask_head, total, { key, threshold, mask_scale }, kv_count, starts, window, cap, blockIdx.y, blockIdx.y / (count / kv_count) }

#define BACKWARD_PARAMETERS                                                                                      \
  const void *qkv, const void *out, const float *lse, const void *d_out, void *d_qkv, const float *delta,        \
      u32 types, HEAD_PARAMETERS
#define SAVED \
  { qkv, d_out, lse, delta, types }

// A matrix in memory: `rows` rows of `width` elements, `stride` apart.
struct Rows {
  const void* x;
  u32 type;
  i64 start, stride;
  int rows, width;
};
INLINE Rows rows_of_qkv(const void* qkv, u32 type, const Head& head, int token, int part) {
  return {qkv, type, at_qkv(head, token, part), qkv_width(head), (int)head.seq_len - token, (int)head.dim};
}
INLINE Rows rows_of_out(const void* out, u32 type, const Head& head, int token) {
  return {out, type, at_row(head, token), row_width(head), (int)head.seq_len - token, (int)head.dim};
}
