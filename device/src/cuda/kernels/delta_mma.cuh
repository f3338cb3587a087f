// The gated delta rule in chunks on tensor cores, for bf16. delta.cu has the same rule in plain fp32. Queries and keys enter products as
// they are stored: each product is exact before it is added in fp32, and 1 / length multiplies the sums. Every number that is not
// stored as bf16 enters a product as the sum of two bf16 numbers, which keeps 16 binary digits of it. The triangular systems are solved
// in fp32. A block has 8 warps. Warp w has the 16 rows of a chunk from 16 (w % 4) on, and half w / 4 of the columns. Two programs have the
// kernels, so NVRTC compiles them at the same time: delta_mma.cu the rule and the gradients of its states, delta_mma_gradients.cu the
// other gradients.

#include "tensor_cores.cuh"
#include "delta.cuh"

struct Cores : Ampere {
  static const int WARPS = 8;
};
typedef OfBf16 T;
typedef Cores::A A;
typedef Cores::B B;

const int KEYS = 128;  // columns of a tile of queries or keys; more than a head has are 0
typedef Tile<Cores, KEYS> KeyTile;
typedef Tile<Cores, COLUMNS> ValueTile;
const int KEY_TILE = ROWS * KeyTile::STRIDE, VALUE_TILE = ROWS * ValueTile::STRIDE;  // elements

INLINE int own_rows() { return threadIdx.x / 32 % 4; }  // number of the warp's 16 rows
INLINE int own_half() { return threadIdx.x / 128; }
// Row in the chunk of elements 2 h and 2 h + 1 of a block of sums; column in 16 columns of element e of sums n.
INLINE int row_of_sum(int e) { return 16 * own_rows() + Cores::row() + e / 2 * Cores::ROW_STEP; }
INLINE int col_of_sum(int n, int e) { return 8 * n + Cores::col() + e % 2; }

// The bf16 number in the upper half of a word; widen_bf16 takes the lower one.
INLINE float widen_upper(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// Two fp32 numbers, each as the sum of a high and a low number of bf16.
struct Split {
  u32 high, low;
};
INLINE Split split(float a, float b) {
  u32 high = pack<T>(a, b);
  return {high, pack<T>(a - widen_bf16(high), b - widen_upper(high))};
}
// Splits a block of sums into two operands a.
INLINE void split_block(A& high, A& low, const float (&sums)[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    Split pair = split(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
    high[i] = pair.high, low[i] = pair.low;
  }
}
// Splits 8 numbers into a row of two tiles.
INLINE void split_row(u16* high, u16* low, const float (&x)[8]) {
  Split pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++) pairs[i] = split(x[2 * i], x[2 * i + 1]);
  *(uint4*)high = make_uint4(pairs[0].high, pairs[1].high, pairs[2].high, pairs[3].high);
  *(uint4*)low = make_uint4(pairs[0].low, pairs[1].low, pairs[2].low, pairs[3].low);
}

// The block `sums` += a b, for an operand b by columns or by rows: of two operands; of a split b; of two that are split.
template <bool BY_ROWS>
INLINE void add_product(float (&sums)[2][4], const A& a, const B& b) {
  Cores::multiply<T, BY_ROWS>(sums[0], sums[1], a, b);
}
template <bool BY_ROWS>
INLINE void add_product(float (&sums)[2][4], const A& a, const B& b_high, const B& b_low) {
  add_product<BY_ROWS>(sums, a, b_high);
  add_product<BY_ROWS>(sums, a, b_low);
}
template <bool BY_ROWS>
INLINE void add_product(float (&sums)[2][4], const A& high, const A& low, const B& b_high, const B& b_low) {
  add_product<BY_ROWS>(sums, high, b_high, b_low);
  add_product<BY_ROWS>(sums, low, b_high);
}

// Gates of the rows of a chunk, and the factors that give queries (0) and keys (1) their lengths.
struct Gates {
  float beta[ROWS], sums[ROWS];  // b; running sums of g, in units of log 2
  float scales[2][ROWS];
};
INLINE float between(const Gates& gates, int i, int j) { return exp2_fast(gates.sums[i] - gates.sums[j]); }
INLINE float since_start(const Gates& gates, int row) { return exp2_fast(gates.sums[row]); }
INLINE float to_end(const Gates& gates, int row) { return exp2_fast(gates.sums[ROWS - 1] - gates.sums[row]); }

INLINE Rows key_rows(const Delta& of, const Chunk& chunk, const void* qkv, int part, int first) {
  return {qkv, BF16, at_key(of, chunk.first, part) + first, columns(of), chunk.rows, (int)of.key_dim - first};
}

// Reads the gates of a chunk, and the lengths of its queries and keys from their tiles, whose copies have arrived. All threads may
// use the result after the call.
INLINE void read_gates(const Delta& of, const Chunk& chunk, const float* from, const u16* queries, Gates& gates) {
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
  const u16* tile = queries + row * KeyTile::STRIDE + lane / 16 * (KEYS / 2);
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < KEYS / 2; i += 8) {
    uint4 raw = *(const uint4*)(tile + i);
    u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float a = widen_bf16(words[j]), b = widen_upper(words[j]);
      square = fmaf(a, a, square), square = fmaf(b, b, square);
    }
  }
  square += __shfl_xor_sync(0xffffffffu, square, 16);
  float scale = row < ROWS ? 1.0f / sqrtf((float)of.key_dim) : 1.0f;
  if (lane < 16) gates.scales[row / ROWS][row % ROWS] = 1.0f / sqrtf(square + 1e-6f) * scale;
  if (threadIdx.x < 32) {
    // A lane has two rows.
    float g[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int at = 2 * lane + i;
      gates.beta[at] = at < chunk.rows ? from[at_gate(of, chunk.first + at, 0)] : 0.0f;
      g[i] = at < chunk.rows ? from[at_gate(of, chunk.first + at, 1)] : 0.0f;
    }
    float sum = g[0] + g[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      float other = __shfl_sync(0xffffffffu, sum, (lane - step) & 31);
      if (lane >= step) sum += other;
    }
    // A difference of sums would lose the digits of a small gate next to a large one.
    float other = __shfl_sync(0xffffffffu, sum, (lane - 1) & 31), before = lane ? other : 0.0f;
    const float TO_LOG2 = 1.44269504088896340736f;
    gates.sums[2 * lane] = (before + g[0]) * TO_LOG2, gates.sums[2 * lane + 1] = (before + g[0] + g[1]) * TO_LOG2;
  }
  __syncthreads();
}

// A state (keys, COLUMNS), or its gradient: a warp has the 16 keys from 16 (w % 4) on, those 64 further, and half of the columns.
typedef float State[2][2][4];
// Calls f with the key, the column of the block, and the two sums from there on.
template <class F>
INLINE void each_pair_of_state(State& state, F f) {
#pragma unroll
  for (int b = 0; b < 2; b++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e += 2)
        f(row_of_sum(e) + 64 * b, 16 * own_half() + col_of_sum(n, e), state[b][n][e], state[b][n][e + 1]);
}
const int STATE_TILE = KEYS * ValueTile::STRIDE;  // elements
// Splits a state into two tiles.
INLINE void split_state(State& state, u16* tiles) {
  each_pair_of_state(state, [&](int key, int col, float a, float b) {
    Split pair = split(a, b);
    *(u32*)(tiles + key * ValueTile::STRIDE + col) = pair.high;
    *(u32*)(tiles + STATE_TILE + key * ValueTile::STRIDE + col) = pair.low;
  });
}
// Elements 0 and 1 of `to`, of which `count` exist.
INLINE void store_two(float* to, int count, const float (&x)[2]) {
  if (count >= 2 && ((u64)to & 7) == 0) {
    uint2 pair;
    pair.x = __float_as_uint(x[0]), pair.y = __float_as_uint(x[1]);
    *(uint2*)to = pair;
  } else {
    if (count > 0) to[0] = x[0];
    if (count > 1) to[1] = x[1];
  }
}
INLINE void load_two(const float* from, int count, float& a, float& b) {
  if (count >= 2 && ((u64)from & 7) == 0) {
    uint2 pair = *(const uint2*)from;
    a = __uint_as_float(pair.x), b = __uint_as_float(pair.y);
  } else {
    a = count > 0 ? from[0] : 0.0f, b = count > 1 ? from[1] : 0.0f;
  }
}
// Columns of a state in memory that exist from column `col` of the block on; 0 for a key that does not.
INLINE int columns_of_key(const Delta& of, int key, int col) {
  return key < (int)of.key_dim ? (int)of.value_dim - (int)(blockIdx.x * COLUMNS) - col : 0;
}
INLINE i64 at_state_pair(const Delta& of, int key, int col) { return (i64)key * of.value_dim + blockIdx.x * COLUMNS + col; }
INLINE void store_state(const Delta& of, State& state, float* to, bool is_zero) {
  each_pair_of_state(state, [&](int key, int col, float a, float b) {
    float pair[2] = {is_zero ? 0.0f : a, is_zero ? 0.0f : b};
    store_two(to + at_state_pair(of, key, col), columns_of_key(of, key, col), pair);
  });
}
INLINE void load_state(const Delta& of, State& state, const float* from) {
  each_pair_of_state(state, [&](int key, int col, float& a, float& b) {
    load_two(from + at_state_pair(of, key, col), columns_of_key(of, key, col), a, b);
  });
}
// sums += x' y, for queries or keys x and y (ROWS, COLUMNS), which is split.
INLINE void add_outer_product(State& sums, const u16* x, const u16* y) {
#pragma unroll
  for (int j = 0; j < ROWS / 16; j++) {
    B high, low;
    ValueTile::load_rows(high, y, 16 * j, 16 * own_half());
    ValueTile::load_rows(low, y + VALUE_TILE, 16 * j, 16 * own_half());
#pragma unroll
    for (int b = 0; b < 2; b++) {
      A a;
      Cores::load_a_transposed(a, x + 16 * j * KeyTile::STRIDE + 16 * own_rows() + 64 * b, KeyTile::STRIDE);
      add_product<true>(sums[b], a, high, low);
    }
  }
}
// state = decay state + sums. Tensor cores cut off the digits behind those of their sums, so a state is never one of their sums.
INLINE void decay_state(State& state, float decay, const State& sums) {
#pragma unroll
  for (int b = 0; b < 2; b++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) state[b][n][e] = fmaf(decay, state[b][n][e], sums[b][n][e]);
}

// The part of A that the warp has: blocks of its rows and every other 16 columns below the diagonal.
struct Links {
  float sums[2][2][4];
};
// Calls f with the number of each such block among the warp's, and among all.
template <class F>
INLINE void each_link(F f) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int block = 2 * i + own_half();
    if (block > own_rows()) break;
    f(i, block);
  }
}
INLINE void add_links(Links& links, const A& keys, const u16* tile, int col) {
  each_link([&](int i, int block) {
    B b;
    KeyTile::load_columns(b, tile, 16 * block, col);
    add_product<false>(links.sums[i], keys, b);
  });
}
INLINE void store_links(const Links& links, const Gates& gates, Pairs& pairs) {
  each_link([&](int i, int block) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int row = row_of_sum(e), col = 16 * block + col_of_sum(n, e);
        float x = links.sums[i][n][e] * gates.scales[1][row] * gates.scales[1][col] * gates.beta[row];
        pairs[row][col] = col < row ? x * between(gates, row, col) : 0.0f;
      }
  });
}

// Elements `at` and `at` + 1 of x, of which `count` exist; the others are 0.
INLINE void load_pair(const void* x, i64 at, int count, float (&v)[2]) {
  const u16* from = (const u16*)x + at;
  u32 raw = 0;
  if (count >= 2 && ((u64)from & 3) == 0) raw = *(const u32*)from;
  else {
    if (count > 0) raw = from[0];
    if (count > 1) raw |= (u32)from[1] << 16;
  }
  v[0] = widen_bf16(raw), v[1] = widen_upper(raw);
}
INLINE void store_pair(void* y, i64 at, int count, float a, float b) {
  u16* to = (u16*)y + at;
  u32 raw = pack<T>(a, b);
  if (count >= 2 && ((u64)to & 3) == 0) *(u32*)to = raw;
  else {
    if (count > 0) to[0] = (u16)raw;
    if (count > 1) to[1] = (u16)(raw >> 16);
  }
}

// Columns that exist from column `col` of the block on; at most 0 for a row that does not.
INLINE int columns_left(const Delta& of, const Chunk& chunk, int row, int col) {
  return row < chunk.rows ? (int)of.value_dim - (int)(blockIdx.x * COLUMNS) - col : 0;
}

// b (v - e^G k S), where `sums` has the products of keys as they are and the state.
INLINE void store_remainder(const Delta& of, const Chunk& chunk, const void* qkv, const Gates& gates, const float (&sums)[2][4],
                            Columns& x) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      int row = row_of_sum(e), col = 16 * own_half() + col_of_sum(n, e);
      float own[2], factor = -since_start(gates, row) * gates.scales[1][row];
      i64 at = at_value(of, chunk.first + row) + blockIdx.x * COLUMNS + col;
      load_pair(qkv, at, columns_left(of, chunk, row, col), own);
#pragma unroll
      for (int i = 0; i < 2; i++) x[row][col + i] = gates.beta[row] * fmaf(factor, sums[n][e + i], own[i]);
    }
}

// A thread has 8 columns of a row of values.
INLINE int row_of_thread() { return threadIdx.x / 4; }
INLINE int col_of_thread() { return threadIdx.x % 4 * 8; }

// Stores a thread's part of columns (B T, H e) in fp32.
INLINE void store_values(const Delta& of, const Chunk& chunk, const Columns& x, float* to) {
  int row = row_of_thread(), left = columns_left(of, chunk, row, col_of_thread());
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] = x[row][col_of_thread() + i];
  if (left > 0) store8(to, F32, at_out(of, chunk.first + row) + blockIdx.x * COLUMNS + col_of_thread(), min(left, 8), values);
}
