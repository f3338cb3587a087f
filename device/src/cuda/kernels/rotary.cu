// Rotary positions by halves of the first `turns` elements of a head, in place, with the norm of
// each head of q and k in models that have one. A team of `lanes` lanes of a warp, a power of two,
// has one head of one row at a time, and a lane has 8 pairs of it: first lanes with pairs that turn,
// then lanes with pairs of the other elements. The head's loads and stores are then as wide as those
// of element-wise kernels.
//
// Bytes: q and k are read once and written once; the norm's inputs are written once forward and
// read once backward. That is minimal. In addition there are the table and, for gradients of gains,
// at most 1024 rows of D.

// A block's parameters about the heads.
struct Turned {
  u32 rows, count, kv_count, seq_len, dim, turns, lanes;
  float epsilon, offset;  // `offset` is added to the gains
  u32 types;  // types of qkv, the gains of q and k, raw
  const int* starts;  // by row, where its document starts in its sample; null: at 0
};

#define TURNED_PARAMETERS \
  u32 types, u32 rows, u32 count, u32 kv_count, u32 seq_len, u32 dim, u32 turns, u32 lanes, float epsilon, \
      float offset, const int* starts
#define TURNED \
  { rows, count, kv_count, seq_len, dim, turns, lanes, epsilon, offset, types, starts }

// Up to 8 pairs of a head: x[0] are its elements from `low` on, x[1] those from `high` on. Pairs from n
// on are 0.
typedef float Pairs[2][8];
struct Place {
  u32 low, high;
  int n;
  bool turns;
};

// The pairs of a lane are from the two halves of the elements that turn, or from the two halves of the
// others.
INLINE Place place_of_lane(const Turned& turned, bool there) {
  u32 lane = threadIdx.x % turned.lanes, turning = (turned.turns / 2 + 7) / 8;
  bool turns = lane < turning;
  u32 start = turns ? 0 : turned.turns, half = (turns ? turned.turns : turned.dim - turned.turns) / 2;
  u32 first = 8 * (turns ? lane : lane - turning);
  return {start + first, start + half + first, there && first < half ? run_length(first, half) : 0, turns};
}

INLINE void load_pairs(Pairs& x, const void* from, u32 type, i64 at, Place place) {
  load8(from, type, at + place.low, place.n, x[0]);
  load8(from, type, at + place.high, place.n, x[1]);
}

INLINE void store_pairs(const Pairs& x, void* to, u32 type, i64 at, Place place) {
  store8(to, type, at + place.low, place.n, x[0]);
  store8(to, type, at + place.high, place.n, x[1]);
}

// Dot product over the head.
INLINE float dot_pairs(const Pairs& x, const Pairs& y, u32 lanes) {
  float sum = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int j = 0; j < 8; j++) sum = fmaf(x[half][j], y[half][j], sum);
  return warp_combine(sum, lanes, plus);
}

// 1 / sqrt(mean(x^2) + epsilon)
INLINE float inverse_root(const Pairs& x, const Turned& turned) {
  return 1.0f / sqrtf(fmaf(dot_pairs(x, x, turned.lanes), 1.0f / (float)turned.dim, turned.epsilon));
}

// Rotates x by its position, or back.
INLINE void turn(Pairs& x, const float* table, u32 row, Place place, const Turned& turned, bool back) {
  if (!place.turns) return;
  Pairs angle;
  u32 position = row % turned.seq_len;
  if (turned.starts && place.n > 0) position -= turned.starts[row];
  load_pairs(angle, table, F32, (i64)position * turned.turns, place);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float c = angle[0][j], s = back ? -angle[1][j] : angle[1][j], a = x[0][j], b = x[1][j];
    x[0][j] = fmaf(a, c, -b * s);
    x[1][j] = fmaf(b, c, a * s);
  }
}

// Rotates the heads of q and k of each row, or rotates them back, one head per team. With a norm
// (raw is not null) it stores and norms them first.
KERNEL(256) rotary(void* qkv, const float* table, const void* q_gain, const void* k_gain, void* raw, u32 back,
                   TURNED_PARAMETERS) {
  Turned turned = TURNED;
  u32 heads = count + kv_count, unit = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
  u32 row = unit / heads, head = unit % heads;
  Place place = place_of_lane(turned, unit < rows * heads);
  i64 at = ((i64)row * (count + 2 * kv_count) + head) * dim;
  Pairs x;
  load_pairs(x, qkv, type_of(types, 0), at, place);
  if (raw) {
    store_pairs(x, raw, type_of(types, 3), (i64)unit * dim, place);
    float scale = inverse_root(x, turned);
    bool of_k = head >= count;
    Pairs gain;
    load_pairs(gain, of_k ? k_gain : q_gain, type_of(types, of_k ? 2 : 1), 0, place);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < 8; j++) x[half][j] *= scale * (gain[half][j] + offset);
  }
  turn(x, table, row, place, turned, back);
  store_pairs(x, qkv, type_of(types, 0), at, place);
}

// Turns gradients of normed and rotated heads into gradients of `rotary`'s inputs. The first
// `q_blocks` blocks have `each` heads of q in turn, the others have `each` heads of k. Each block
// writes its part of the gain's gradient to its row of partials (blocks, D).
KERNEL(256) rotary_backward(void* d_qkv, const float* table, const void* q_gain, const void* k_gain, const void* raw,
                            float* partials, u32 q_blocks, u32 each, TURNED_PARAMETERS) {
  __shared__ float sums[8][256];
  Turned turned = TURNED;
  bool of_k = blockIdx.x >= q_blocks;
  u32 heads = of_k ? kv_count : count, teams = blockDim.x / lanes, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 start = (blockIdx.x - (of_k ? q_blocks : 0)) * each, end = start + each;
  end = end < rows * heads ? end : rows * heads;
  const void* gains = of_k ? k_gain : q_gain;
  Pairs sum = {};
  // The loop runs over the first head of the warp, so that all its lanes stay together.
  for (u32 of_warp = start + warp * (32 / lanes); of_warp < end; of_warp += teams) {
    u32 unit = of_warp + lane / lanes, row = unit / heads, head = unit % heads + (of_k ? count : 0);
    Place place = place_of_lane(turned, unit < end);
    i64 at = ((i64)row * (count + 2 * kv_count) + head) * dim;
    Pairs d, n;
    load_pairs(d, d_qkv, type_of(types, 0), at, place);
    load_pairs(n, raw, type_of(types, 3), ((i64)row * (count + kv_count) + head) * dim, place);
    turn(d, table, row, place, turned, true);
    float scale = inverse_root(n, turned);
    // Where there is no head, its root may be 0.
    if (place.n == 0) scale = 0.0f;
    Pairs gain;
    load_pairs(gain, gains, type_of(types, of_k ? 2 : 1), 0, place);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < 8; j++) {
        n[half][j] *= scale;
        sum[half][j] = fmaf(d[half][j], n[half][j], sum[half][j]);
        d[half][j] *= gain[half][j] + offset;
      }
    float mean = dot_pairs(d, n, lanes) / (float)dim;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < 8; j++) d[half][j] = fmaf(n[half][j], -mean, d[half][j]) * scale;
    store_pairs(d, d_qkv, type_of(types, 0), at, place);
  }
  // Adds the sums of a warp's teams, then those of the warps in order.
  Place own = place_of_lane(turned, lane < lanes);
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int j = 0; j < 8; j++) {
      for (u32 other = 16; other >= lanes; other /= 2) sum[half][j] += __shfl_xor_sync(0xffffffffu, sum[half][j], other);
      if (j < own.n) sums[warp][(half ? own.high : own.low) + j] = sum[half][j];
    }
  __syncthreads();
  for (u32 col = threadIdx.x; col < dim; col += blockDim.x) {
    float total = 0.0f;
    for (int other = 0; other < 8; other++) total += sums[other][col];
    partials[(i64)blockIdx.x * dim + col] = total;
  }
}

// Gradients of the gains of q and k (y 0 and 1): sums over the rows of each part's partials, added up as in column_sum.
KERNEL(1024) rotary_gains(const float* partials, void* d_q_gain, void* d_k_gain, u32 types, u32 q_blocks, u32 blocks,
                          u32 dim) {
  __shared__ float sums[32][32];
  u32 part = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = 32 * blockIdx.x + lane;
  u32 start = part == 0 ? 0 : q_blocks, end = part == 0 ? q_blocks : blocks;
  float sum = 0.0f;
  if (col < dim) {
#pragma unroll 4
    for (u32 row = start + warp; row < end; row += 32) sum += partials[(i64)row * dim + col];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && col < dim) {
    for (int other = 1; other < 32; other++) sum += sums[other][lane];
    store1(part == 0 ? d_q_gain : d_k_gain, type_of(types, part), col, sum);
  }
}
