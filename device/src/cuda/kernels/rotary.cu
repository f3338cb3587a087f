// Rotary positions by halves, in place, with the norm of each head of q and k where a model has one. A warp has one head
// of one row at a time; a lane has pairs lane, lane + 32, ... of it, so heads have at most 256 elements. One pass: every
// element of q and k is read once and written once, and the norm's input with it.

#define PAIRS 4

// What a block needs to know of the heads.
struct Turned {
  u32 count, kv_count, seq_len, dim;
  float epsilon;
  u32 types;  // of qkv, the gains of q and k, raw
};

#define TURNED_PARAMETERS u32 types, u32 count, u32 kv_count, u32 seq_len, u32 dim, float epsilon
#define TURNED \
  { count, kv_count, seq_len, dim, epsilon, types }

// Pairs of a head: x[0] and x[1] are its halves. 0 behind it.
typedef float Pairs[2][PAIRS];

INLINE void load_pairs(Pairs& x, const void* from, u32 type, i64 at, u32 dim) {
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    u32 pair = threadIdx.x % 32 + 32 * j;
    bool there = pair < dim / 2;
    x[0][j] = there ? load1(from, type, at + pair) : 0.0f;
    x[1][j] = there ? load1(from, type, at + dim / 2 + pair) : 0.0f;
  }
}

INLINE void store_pairs(const Pairs& x, void* to, u32 type, i64 at, u32 dim) {
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    u32 pair = threadIdx.x % 32 + 32 * j;
    if (pair < dim / 2) {
      store1(to, type, at + pair, x[0][j]);
      store1(to, type, at + dim / 2 + pair, x[1][j]);
    }
  }
}

INLINE float dot_pairs(const Pairs& x, const Pairs& y) {
  float sum = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int j = 0; j < PAIRS; j++) sum = fmaf(x[half][j], y[half][j], sum);
  return warp_combine(sum, 32, plus);
}

// 1 / sqrt(mean(x^2) + epsilon)
INLINE float inverse_root(const Pairs& x, const Turned& turned) {
  return 1.0f / sqrtf(fmaf(dot_pairs(x, x), 1.0f / (float)turned.dim, turned.epsilon));
}

// x turns by its position; backward it turns back.
INLINE void turn(Pairs& x, const float* table, i64 row, const Turned& turned, bool back) {
  const float* cosines = table + row % turned.seq_len * turned.dim;
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    u32 pair = threadIdx.x % 32 + 32 * j;
    if (pair >= turned.dim / 2) continue;
    float c = cosines[pair], s = cosines[turned.dim / 2 + pair], a = x[0][j], b = x[1][j];
    s = back ? -s : s;
    x[0][j] = fmaf(a, c, -b * s);
    x[1][j] = fmaf(b, c, a * s);
  }
}

// The heads of q and k of each row turn; with a norm (raw is not null) they are kept and normed first.
KERNEL(256) rotary(void* qkv, const float* table, const void* q_gain, const void* k_gain, void* raw, i64 rows,
                   TURNED_PARAMETERS) {
  Turned turned = TURNED;
  u32 heads = count + kv_count;
  for (i64 unit = (i64)blockIdx.x * 8 + threadIdx.x / 32; unit < rows * heads; unit += (i64)gridDim.x * 8) {
    i64 row = unit / heads, head = unit % heads;
    i64 at = row * (count + 2 * kv_count) * dim + head * dim;
    Pairs x;
    load_pairs(x, qkv, type_of(types, 0), at, dim);
    if (raw) {
      store_pairs(x, raw, type_of(types, 3), unit * dim, dim);
      Pairs gain;
      bool of_k = head >= count;
      load_pairs(gain, of_k ? k_gain : q_gain, type_of(types, of_k ? 2 : 1), 0, dim);
      float scale = inverse_root(x, turned);
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < PAIRS; j++) x[half][j] *= scale * gain[half][j];
    }
    turn(x, table, row, turned, false);
    store_pairs(x, qkv, type_of(types, 0), at, dim);
  }
}

// Gradients of rotated heads become those of what `rotary` was given. With a norm, block b of part p (0: q, 1: k) has
// every gridDim.x-th run of 8 heads of its part, and leaves its part of the gradient of the gain in partials (2,
// gridDim.x, D).
KERNEL(256) rotary_backward(void* d_qkv, const float* table, const void* q_gain, const void* k_gain, const void* raw,
                            float* partials, i64 rows, TURNED_PARAMETERS) {
  __shared__ float sums[8][64 * PAIRS];
  Turned turned = TURNED;
  u32 part = blockIdx.y, heads = raw ? (part == 0 ? count : kv_count) : count + kv_count, first = part == 0 ? 0 : count;
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Pairs sum = {}, gain = {};
  if (raw) load_pairs(gain, part == 0 ? q_gain : k_gain, type_of(types, part == 0 ? 1 : 2), 0, dim);
  for (i64 unit = (i64)blockIdx.x * 8 + warp; unit < rows * heads; unit += (i64)gridDim.x * 8) {
    i64 row = unit / heads, head = first + unit % heads;
    i64 at = row * (count + 2 * kv_count) * dim + head * dim;
    Pairs d;
    load_pairs(d, d_qkv, type_of(types, 0), at, dim);
    turn(d, table, row, turned, true);
    if (raw) {
      Pairs n;
      load_pairs(n, raw, type_of(types, 3), (row * (count + kv_count) + head) * dim, dim);
      float scale = inverse_root(n, turned);
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
          n[half][j] *= scale;
          sum[half][j] = fmaf(d[half][j], n[half][j], sum[half][j]);
          d[half][j] *= gain[half][j];
        }
      float mean = dot_pairs(d, n) / (float)dim;
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < PAIRS; j++) d[half][j] = fmaf(n[half][j], -mean, d[half][j]) * scale;
    }
    store_pairs(d, d_qkv, type_of(types, 0), at, dim);
  }
  if (!raw) return;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int j = 0; j < PAIRS; j++) sums[warp][half * 32 * PAIRS + 32 * j + lane] = sum[half][j];
  __syncthreads();
  for (u32 col = threadIdx.x; col < dim; col += blockDim.x) {
    u32 half = col / (dim / 2), at = half * 32 * PAIRS + col % (dim / 2);
    float total = 0.0f;
    for (int other = 0; other < 8; other++) total += sums[other][at];
    partials[((i64)part * gridDim.x + blockIdx.x) * dim + col] = total;
  }
}

// Gradients of the gains of q and k (block 0 and 1): the partials in order.
KERNEL(256) rotary_gains(const float* partials, void* d_q_gain, void* d_k_gain, u32 types, u32 count, u32 dim) {
  u32 part = blockIdx.x;
  for (u32 col = threadIdx.x; col < dim; col += blockDim.x) {
    float sum = 0.0f;
    for (u32 i = 0; i < count; i++) sum += partials[((i64)part * count + i) * dim + col];
    store1(part == 0 ? d_q_gain : d_k_gain, type_of(types, part), col, sum);
  }
}
