// The gated delta rule in chunks on tensor cores, for bf16. delta.cu has the same rule in plain fp32. Queries and keys enter products as
// they are stored: each product is exact before it is added in fp32, and 1 / length multiplies the sums. Every number that is not
// stored as bf16 enters a product as the sum of two bf16 numbers, which keeps 16 binary digits of it. The triangular systems are solved
// in fp32. A block has 8 warps. Warp w has the 16 rows of a chunk from 16 (w % 4) on, and half w / 4 of the columns.

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

struct ForwardOnCores {
  Gates gates;
  u16 queries[KEY_TILE], keys[KEY_TILE];
  Pairs pairs;
  Columns v;
  u16 tiles[2 * STATE_TILE];  // the state; then V, and V as it adds to the state
};

// delta_rule for bf16, of the same blocks.
INLINE void forward_on_cores(const void* qkv, const float* gates, void* out, float* states, const float* initial, const Delta& of) {
  DYNAMIC_SHARED(dynamic);
  ForwardOnCores& shared = *(ForwardOnCores*)dynamic;
  State state = {};
  int written = -1, run = 0;
#pragma unroll 1
  for (int first = 0; first < (int)of.seq_len;) {
    Chunk chunk = chunk_from(of, first);
    KeyTile::begin<ROWS>(shared.queries, key_rows(of, chunk, qkv, 0, 0));
    KeyTile::begin<ROWS>(shared.keys, key_rows(of, chunk, qkv, 1, 0));
    if (chunk.is_first) {
      if (initial && first == 0) load_state(of, state, initial + at_initial(of));
      else each_pair_of_state(state, [](int, int, float& a, float& b) { a = b = 0.0f; });
    }
    // At most one chunk that continues a document begins in each run of 64 rows, and its state stays there.
    run = first / ROWS;
    if (!chunk.is_first || run != written) store_state(of, state, states + at_state(of, first), chunk.is_first);
    if (!chunk.is_first) written = run;
    split_state(state, shared.tiles);
    Cores::wait_copies();
    __syncthreads();
    read_gates(of, chunk, gates, shared.queries, shared.gates);
    Links links = {};
    float p[4][2][4] = {}, w[2][4] = {}, o[2][4] = {};
#pragma unroll 1
    for (int col = 0; col < (int)of.key_dim; col += 16) {
      A key, query;
      KeyTile::load_a(key, shared.keys, 16 * own_rows(), col);
      KeyTile::load_a(query, shared.queries, 16 * own_rows(), col);
#pragma unroll
      for (int block = 0; block < 4; block++) {
        if (block > own_rows()) break;
        B b;
        KeyTile::load_columns(b, shared.keys, 16 * block, col);
        add_product<false>(p[block], query, b);
        if (block % 2 == own_half()) add_product<false>(links.sums[block / 2], key, b);
      }
      B high, low;
      ValueTile::load_rows(high, shared.tiles, col, 16 * own_half());
      ValueTile::load_rows(low, shared.tiles + STATE_TILE, col, 16 * own_half());
      add_product<true>(w, key, high, low);
      add_product<true>(o, query, high, low);
    }
    store_links(links, shared.gates, shared.pairs);
    store_remainder(of, chunk, qkv, shared.gates, w, shared.v);
    A p_high[4], p_low[4];
#pragma unroll
    for (int block = 0; block < 4; block++) {
      if (block > own_rows()) break;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int row = row_of_sum(e), col = 16 * block + col_of_sum(n, e);
          float x = p[block][n][e] * shared.gates.scales[0][row] * shared.gates.scales[1][col];
          p[block][n][e] = col <= row ? x * between(shared.gates, row, col) : 0.0f;
        }
      split_block(p_high[block], p_low[block], p[block]);
    }
    __syncthreads();
    solve(shared.pairs, shared.v, chunk.rows, false);
    __syncthreads();
    {
      int row = row_of_thread(), at = row * ValueTile::STRIDE + col_of_thread();
      float v[8], factor = to_end(shared.gates, row) * shared.gates.scales[1][row];
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = shared.v[row][col_of_thread() + i];
      split_row(shared.tiles + at, shared.tiles + VALUE_TILE + at, v);
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] *= factor;
      split_row(shared.tiles + 2 * VALUE_TILE + at, shared.tiles + 3 * VALUE_TILE + at, v);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int row = row_of_sum(e);
        o[n][e] *= since_start(shared.gates, row) * shared.gates.scales[0][row];
      }
#pragma unroll
    for (int block = 0; block < 4; block++) {
      if (block > own_rows()) break;
      B high, low;
      ValueTile::load_rows(high, shared.tiles, 16 * block, 16 * own_half());
      ValueTile::load_rows(low, shared.tiles + VALUE_TILE, 16 * block, 16 * own_half());
      add_product<true>(o, p_high[block], p_low[block], high, low);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        int row = row_of_sum(e), col = 16 * own_half() + col_of_sum(n, e);
        i64 at = at_out(of, first + row) + blockIdx.x * COLUMNS + col;
        store_pair(out, at, columns_left(of, chunk, row, col), o[n][e], o[n][e + 1]);
      }
    // The lanes of a warp take part in products together again.
    __syncwarp();
    State sums = {};
    add_outer_product(sums, shared.keys, shared.tiles + 2 * VALUE_TILE);
    decay_state(state, exp2_fast(shared.gates.sums[ROWS - 1]), sums);
    first += chunk.rows;
    // All warps have left the tiles.
    __syncthreads();
  }
  // A chunk begins in every run but perhaps the last, which can be short.
  if ((run + 1) * ROWS < (int)of.seq_len) store_state(of, state, states + at_state(of, (run + 1) * ROWS), true);
}

KERNEL(256) delta_rule_mma(const void* qkv, const float* gates, void* out, float* states, const float* initial, u32,
                           DELTA_PARAMETERS) {
  if constexpr (Cores::HERE) forward_on_cores(qkv, gates, out, states, initial, DELTA);
}

struct StatesOnCores {
  Gates gates;
  u16 queries[KEY_TILE], keys[KEY_TILE];
  Pairs pairs;
  Columns x;
  u16 d_out[VALUE_TILE];
  u16 tiles[2 * STATE_TILE];  // the state; its gradient; then d_out and d_r as they add to the gradient
};

// delta_rule_states for bf16, of the same blocks.
INLINE void states_on_cores(const void* qkv, const float* gates, const float* states, const void* d_out, void* d_qkv, float* v,
                            float* d_r, float* d_states, const Delta& of) {
  DYNAMIC_SHARED(dynamic);
  StatesOnCores& shared = *(StatesOnCores*)dynamic;
  State d_state = {};
  int row = row_of_thread(), tile_at = row * ValueTile::STRIDE + col_of_thread();
#pragma unroll 1
  for (int end = of.seq_len; end > 0;) {
    Chunk chunk = chunk_before(of, end);
    end = chunk.first;
    KeyTile::begin<ROWS>(shared.queries, key_rows(of, chunk, qkv, 0, 0));
    KeyTile::begin<ROWS>(shared.keys, key_rows(of, chunk, qkv, 1, 0));
    u32 first_column = blockIdx.x * COLUMNS;
    ValueTile::begin<ROWS>(shared.d_out, {d_out, BF16, at_out(of, chunk.first) + first_column, (i64)of.values * of.value_dim,
                                          chunk.rows, (int)(of.value_dim - first_column)});
    i64 place = at_state(of, chunk.first);
    {
      State state = {};
      if (!chunk.is_first) load_state(of, state, states + place);
      split_state(state, shared.tiles);
    }
    if (chunk.is_last) each_pair_of_state(d_state, [](int, int, float& a, float& b) { a = b = 0.0f; });
    Cores::wait_copies();
    __syncthreads();
    read_gates(of, chunk, gates, shared.queries, shared.gates);
    Links links = {};
    // Products of the warp's keys with the queries of the same and of later rows.
    float p[4][2][4] = {}, w[2][4] = {}, d[2][4] = {};
#pragma unroll 1
    for (int col = 0; col < (int)of.key_dim; col += 16) {
      A key;
      KeyTile::load_a(key, shared.keys, 16 * own_rows(), col);
      add_links(links, key, shared.keys, col);
#pragma unroll
      for (int block = 3; block >= 0; block--) {
        if (block < own_rows()) break;
        B b;
        KeyTile::load_columns(b, shared.queries, 16 * block, col);
        add_product<false>(p[block], key, b);
      }
      B high, low;
      ValueTile::load_rows(high, shared.tiles, col, 16 * own_half());
      ValueTile::load_rows(low, shared.tiles + STATE_TILE, col, 16 * own_half());
      add_product<true>(w, key, high, low);
    }
    store_links(links, shared.gates, shared.pairs);
    store_remainder(of, chunk, qkv, shared.gates, w, shared.x);
    __syncthreads();
    split_state(d_state, shared.tiles);
    solve(shared.pairs, shared.x, chunk.rows, false);
    __syncthreads();
    store_values(of, chunk, shared.x, v);
#pragma unroll 1
    for (int col = 0; col < (int)of.key_dim; col += 16) {
      A key;
      B high, low;
      KeyTile::load_a(key, shared.keys, 16 * own_rows(), col);
      ValueTile::load_rows(high, shared.tiles, col, 16 * own_half());
      ValueTile::load_rows(low, shared.tiles + STATE_TILE, col, 16 * own_half());
      add_product<true>(d, key, high, low);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) d[n][e] *= to_end(shared.gates, row_of_sum(e)) * shared.gates.scales[1][row_of_sum(e)];
#pragma unroll
    for (int block = 3; block >= 0; block--) {
      if (block < own_rows()) break;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int key = row_of_sum(e), query = 16 * block + col_of_sum(n, e);
          float x = p[block][n][e] * shared.gates.scales[1][key] * shared.gates.scales[0][query];
          p[block][n][e] = key <= query ? x * between(shared.gates, query, key) : 0.0f;
        }
      A high, low;
      B of_out;
      split_block(high, low, p[block]);
      ValueTile::load_rows(of_out, shared.d_out, 16 * block, 16 * own_half());
      add_product<true>(d, high, of_out);
      add_product<true>(d, low, of_out);
    }
    // All threads have stored V and left the tiles.
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) shared.x[row_of_sum(e)][16 * own_half() + col_of_sum(n, e)] = d[n][e];
    __syncthreads();
    solve(shared.pairs, shared.x, chunk.rows, true);
    __syncthreads();
    store_values(of, chunk, shared.x, d_r);
    {
      float r[8], d_o[8], beta = shared.gates.beta[row], since = since_start(shared.gates, row);
      float of_query = since * shared.gates.scales[0][row], of_key = -since * beta * shared.gates.scales[1][row];
#pragma unroll
      for (int i = 0; i < 8; i++) r[i] = shared.x[row][col_of_thread() + i];
      uint4 raw = *(const uint4*)(shared.d_out + tile_at);
      u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 8; i++)
        d_o[i] = of_query * (i % 2 ? widen_upper(words[i / 2]) : widen_bf16(words[i / 2]));
      split_row(shared.tiles + tile_at, shared.tiles + VALUE_TILE + tile_at, d_o);
#pragma unroll
      for (int i = 0; i < 8; i++) d_o[i] = of_key * r[i], r[i] *= beta;
      split_row(shared.tiles + 2 * VALUE_TILE + tile_at, shared.tiles + 3 * VALUE_TILE + tile_at, d_o);
      int left = columns_left(of, chunk, row, col_of_thread());
      if (left > 0) store8(d_qkv, BF16, at_value(of, chunk.first + row) + first_column + col_of_thread(), min(left, 8), r);
    }
    __syncthreads();
    if (!chunk.is_first) {
      State sums = {};
      add_outer_product(sums, shared.queries, shared.tiles);
      add_outer_product(sums, shared.keys, shared.tiles + 2 * VALUE_TILE);
      decay_state(d_state, exp2_fast(shared.gates.sums[ROWS - 1]), sums);
      store_state(of, d_state, d_states + place, false);
      // All warps have left the tiles.
      __syncthreads();
    }
  }
}

KERNEL(256) delta_rule_states_mma(const void* qkv, const float* gates, const float* states, const void* d_out, void* d_qkv,
                                  float* v, float* d_r, float* d_states, u32, DELTA_PARAMETERS) {
  if constexpr (Cores::HERE) states_on_cores(qkv, gates, states, d_out, d_qkv, v, d_r, d_states, DELTA);
}

const int PART = 16;      // columns of values at a time
const int KEY_PART = 64;  // columns of keys at a time
typedef Tile<Cores, PART> PartTile;
typedef Tile<Cores, KEY_PART> KeyPartTile;
typedef Tile<Cores, ROWS> PairTile;  // pairs of rows
const int PART_TILE = ROWS * PartTile::STRIDE, KEY_PART_TILE = ROWS * KeyPartTile::STRIDE, PAIR_TILE = ROWS * PairTile::STRIDE;

struct GradientsOnCores {
  Gates gates;
  float own[ROWS];                      // products of d_out and V of the same row
  float of_v[ROWS], sums[ROWS];
  float by_half[2][3][ROWS], parts[2][32];
  u16 d_out[PART_TILE];
  u16 d_r[2 * PART_TILE], v[2 * PART_TILE];
  u16 state[2 * PART_TILE], d_state[2 * PART_TILE];  // (KEY_PART, PART)
  u16 queries[KEY_PART_TILE], keys[KEY_PART_TILE];
  union {
    u16 whole[2 * KEY_TILE];                       // queries and keys
    struct { u16 f[2 * PAIR_TILE], e[2 * PAIR_TILE]; } pairs;
  };
};

// A thread's 4 columns of a row.
struct Four {
  float x[4];
};
INLINE Four load_four(const float* from, bool exists) {
  float4 raw = exists ? *(const float4*)from : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  return {{raw.x, raw.y, raw.z, raw.w}};
}
// The same of `count` columns, which may be less than 4 and in any place.
INLINE Four load_some(const float* from, int count) {
  Four four;
#pragma unroll
  for (int i = 0; i < 4; i++) four.x[i] = i < count ? from[i] : 0.0f;
  return four;
}
INLINE void split_four(u16* high, u16* low, const Four& four) {
  Split first = split(four.x[0], four.x[1]), second = split(four.x[2], four.x[3]);
  uint2 pair;
  pair.x = first.high, pair.y = second.high;
  *(uint2*)high = pair;
  pair.x = first.low, pair.y = second.low;
  *(uint2*)low = pair;
}

// What the gradients of a chunk are made of, in memory.
struct Sources {
  const u16* d_out;
  const float *d_r, *v;
  const float *state, *d_state;  // of the chunk; null: 0
  bool wide;  // whether 4 columns are aligned, and exist as a whole
};
// A thread's part of 16 columns of these: of a row of the chunk, and of a row of the states.
struct Parts {
  uint2 d_out;
  Four d_r, v, state, d_state;
};
// Columns first.. of the rows of a chunk, and of row `key` of the states.
INLINE Parts load_parts(const Delta& of, const Chunk& chunk, const Sources& from, int first, int key) {
  int row = threadIdx.x / 4, col = first + threadIdx.x % 4 * 4, left = (int)of.value_dim - col;
  i64 at = at_out(of, chunk.first + row) + col, at_key = (i64)key * of.value_dim + col;
  bool has_row = row < chunk.rows && left > 0, has_key = key < (int)of.key_dim && left > 0;
  Parts parts;
  // All loads are under way together.
  if (from.wide) {
    parts.d_out.x = parts.d_out.y = 0;
    if (has_row) parts.d_out = *(const uint2*)(from.d_out + at);
    parts.d_r = load_four(from.d_r + at, has_row), parts.v = load_four(from.v + at, has_row);
    parts.state = load_four(from.state + at_key, has_key && from.state);
    parts.d_state = load_four(from.d_state + at_key, has_key && from.d_state);
    return parts;
  }
  u32 raw[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (has_row && i < left) raw[i / 2] |= (u32)from.d_out[at + i] << (i % 2 * 16);
  parts.d_out.x = raw[0], parts.d_out.y = raw[1];
  parts.d_r = load_some(from.d_r + at, has_row ? left : 0), parts.v = load_some(from.v + at, has_row ? left : 0);
  parts.state = load_some(from.state + at_key, has_key && from.state ? left : 0);
  parts.d_state = load_some(from.d_state + at_key, has_key && from.d_state ? left : 0);
  return parts;
}
INLINE int at_part() { return threadIdx.x / 4 * PartTile::STRIDE + threadIdx.x % 4 * 4; }
INLINE void store_rows_of_parts(const Parts& parts, GradientsOnCores& shared) {
  *(uint2*)(shared.d_out + at_part()) = parts.d_out;
  split_four(shared.d_r + at_part(), shared.d_r + PART_TILE + at_part(), parts.d_r);
  split_four(shared.v + at_part(), shared.v + PART_TILE + at_part(), parts.v);
}
INLINE void store_states_of_parts(const Parts& parts, GradientsOnCores& shared) {
  split_four(shared.state + at_part(), shared.state + PART_TILE + at_part(), parts.state);
  split_four(shared.d_state + at_part(), shared.d_state + PART_TILE + at_part(), parts.d_state);
}

// The factor b of a row i in the stored e_ij. Results are divided by it again, so it is not 0: less than 2^-60 becomes 2^-60, and the
// term with this factor is then too small to matter.
INLINE float weight_of(const Gates& gates, int row) {
  const float LEAST = 8.6736174e-19f;
  return gates.beta[row] < LEAST ? LEAST : gates.beta[row];
}

// Products of pairs of rows: f_ij = d_out_i V_j M_ij and e_ij = -d_r_i V_j M_ij below the diagonal, times what makes queries and keys
// of row i and keys of row j those of the rule, e_ij also times b_i; the products of d_out, and of d_r and the values, of each row.
INLINE void multiply_values(const Delta& of, const Chunk& chunk, const void* qkv, const Sources& from, GradientsOnCores& shared) {
  float f[2][2][4] = {}, e[2][2][4] = {}, of_v = 0.0f;
  int row = threadIdx.x / 4, no_key = of.key_dim;
  Parts parts = load_parts(of, chunk, from, 0, no_key);
#pragma unroll 1
  for (int first = 0; first < (int)of.value_dim; first += PART) {
    __syncthreads();
    store_rows_of_parts(parts, shared);
    int col = first + threadIdx.x % 4 * 4, left = row < chunk.rows ? (int)of.value_dim - col : 0;
    float own[4];
#pragma unroll
    for (int i = 0; i < 4; i += 2) load_pair(qkv, at_value(of, chunk.first + row) + col + i, left - i, *(float(*)[2])(own + i));
#pragma unroll
    for (int i = 0; i < 4; i++) of_v = fmaf(parts.d_r.x[i], own[i], of_v);
    if (first + PART < (int)of.value_dim) parts = load_parts(of, chunk, from, first + PART, no_key);
    __syncthreads();
    A of_out, high, low;
    PartTile::load_a(of_out, shared.d_out, 16 * own_rows(), 0);
    PartTile::load_a(high, shared.d_r, 16 * own_rows(), 0);
    PartTile::load_a(low, shared.d_r + PART_TILE, 16 * own_rows(), 0);
    each_link([&](int i, int block) {
      B v_high, v_low;
      PartTile::load_columns(v_high, shared.v, 16 * block, 0);
      PartTile::load_columns(v_low, shared.v + PART_TILE, 16 * block, 0);
      add_product<false>(f[i], of_out, v_high, v_low);
      add_product<false>(e[i], high, low, v_high, v_low);
    });
  }
  of_v = warp_combine(of_v, 4, plus);
  if (threadIdx.x % 4 == 0) shared.of_v[row] = of_v;
  // All warps have left the whole queries and keys.
  const Gates& gates = shared.gates;
  each_link([&](int i, int block) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int s = 0; s < 4; s += 2) {
        int row = row_of_sum(s), col = 16 * block + col_of_sum(n, s), at = row * PairTile::STRIDE + col;
        float of_query = gates.scales[0][row], of_key = -gates.scales[1][row] * weight_of(gates, row), x[2], y[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          if (col + j == row) shared.own[row] = f[i][n][s + j];
          bool is_below = col + j < row;
          float factor = is_below ? between(gates, row, col + j) * gates.scales[1][col + j] : 0.0f;
          x[j] = is_below ? f[i][n][s + j] * of_query * factor : 0.0f;
          y[j] = is_below ? e[i][n][s + j] * of_key * factor : 0.0f;
        }
        Split of_f = split(x[0], x[1]), of_e = split(y[0], y[1]);
        *(u32*)(shared.pairs.f + at) = of_f.high, *(u32*)(shared.pairs.f + PAIR_TILE + at) = of_f.low;
        *(u32*)(shared.pairs.e + at) = of_e.high, *(u32*)(shared.pairs.e + PAIR_TILE + at) = of_e.low;
      }
  });
}

// Sums of the warp's rows and 32 columns of keys.
typedef float KeySums[2][2][4];
// sums += the warp's rows of d_out, d_r or V times the transpose of a state, for a part of the values.
INLINE void add_state_parts(KeySums& sums, const A& high, const u16* state) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    B b_high, b_low;
    PartTile::load_columns(b_high, state, 32 * own_half() + 16 * i, 0);
    PartTile::load_columns(b_low, state + PART_TILE, 32 * own_half() + 16 * i, 0);
    add_product<false>(sums[i], high, b_high, b_low);
  }
}
// The same of the low half of rows of d_r or V.
INLINE void add_low_state_parts(KeySums& sums, const A& low, const u16* state) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    B b_high;
    PartTile::load_columns(b_high, state, 32 * own_half() + 16 * i, 0);
    add_product<false>(sums[i], low, b_high);
  }
}
// sums += the block of pairs of the warp's rows and rows 16 block.., or of its transpose, times 32 columns of queries or keys.
template <bool TRANSPOSED>
INLINE void add_pair_product(KeySums& sums, const u16* pairs, int block, const u16* rows) {
  A high, low;
  int at = TRANSPOSED ? 16 * block * PairTile::STRIDE + 16 * own_rows() : 16 * own_rows() * PairTile::STRIDE + 16 * block;
  if (TRANSPOSED) {
    Cores::load_a_transposed(high, pairs + at, PairTile::STRIDE);
    Cores::load_a_transposed(low, pairs + PAIR_TILE + at, PairTile::STRIDE);
  } else {
    Cores::load_a(high, pairs + at, PairTile::STRIDE);
    Cores::load_a(low, pairs + PAIR_TILE + at, PairTile::STRIDE);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    B b;
    KeyPartTile::load_rows(b, rows, 16 * block, 32 * own_half() + 16 * i);
    add_product<true>(sums[i], high, b);
    add_product<true>(sums[i], low, b);
  }
}

// delta_rule_gradients for bf16, of the same blocks.
INLINE void gradients_on_cores(const void* qkv, const float* gates_of, const float* states, const void* d_out, const float* v,
                               const float* d_r, const float* d_states, float* d_gates, float* d_keys, const Delta& of) {
  DYNAMIC_SHARED(dynamic);
  GradientsOnCores& shared = *(GradientsOnCores*)dynamic;
  const Gates& gates = shared.gates;
  int run = blockIdx.x * ROWS, first = run - (run - document_of(of, run)) % ROWS;
  if (first < run) first += chunk_from(of, first).rows;
  bool wide = of.value_dim % 4 == 0 && ((u64)d_out & 7) == 0 && aligned(d_r) && aligned(v) && aligned(states) && aligned(d_states);
#pragma unroll 1
  while (first < run + ROWS && first < (int)of.seq_len) {
    Chunk chunk = chunk_from(of, first);
    first += chunk.rows;
    Sources from = {(const u16*)d_out, d_r, v, chunk.is_first ? nullptr : states + at_state(of, chunk.first),
                    chunk.is_last ? nullptr : d_states + at_state(of, chunk.first + chunk.rows), wide};
    KeyTile::begin<ROWS>(shared.whole, key_rows(of, chunk, qkv, 0, 0));
    KeyTile::begin<ROWS>(shared.whole + KEY_TILE, key_rows(of, chunk, qkv, 1, 0));
    Cores::wait_copies();
    __syncthreads();
    read_gates(of, chunk, gates_of, shared.whole, shared.gates);
    multiply_values(of, chunk, qkv, from, shared);
    // Of the lane's two rows: products with gradients.
    float of_q[2] = {}, of_c[2] = {}, of_k[2] = {}, at_end = 0.0f, of_states = 0.0f;
#pragma unroll 1
    for (int k0 = 0; k0 < (int)of.key_dim; k0 += KEY_PART) {
      // All warps have left the tiles.
      __syncthreads();
      KeyPartTile::begin<ROWS>(shared.queries, key_rows(of, chunk, qkv, 0, k0));
      KeyPartTile::begin<ROWS>(shared.keys, key_rows(of, chunk, qkv, 1, k0));
      KeySums z = {}, x = {}, h = {};
      int key = k0 + threadIdx.x / 4;
      Parts parts = load_parts(of, chunk, from, 0, key);
#pragma unroll 1
      for (int c0 = 0; c0 < (int)of.value_dim; c0 += PART) {
#pragma unroll
        for (int i = 0; i < 4; i++) of_states = fmaf(parts.state.x[i], parts.d_state.x[i], of_states);
        __syncthreads();
        store_rows_of_parts(parts, shared);
        store_states_of_parts(parts, shared);
        if (c0 + PART < (int)of.value_dim) parts = load_parts(of, chunk, from, c0 + PART, key);
        __syncthreads();
        A a;
        PartTile::load_a(a, shared.d_out, 16 * own_rows(), 0);
        add_state_parts(z, a, shared.state);
        PartTile::load_a(a, shared.d_r, 16 * own_rows(), 0);
        add_state_parts(x, a, shared.state);
        PartTile::load_a(a, shared.d_r + PART_TILE, 16 * own_rows(), 0);
        add_low_state_parts(x, a, shared.state);
        PartTile::load_a(a, shared.v, 16 * own_rows(), 0);
        add_state_parts(h, a, shared.d_state);
        PartTile::load_a(a, shared.v + PART_TILE, 16 * own_rows(), 0);
        add_low_state_parts(h, a, shared.d_state);
      }
      Cores::wait_copies();
      __syncthreads();
      float last[2][2][2] = {};
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            int row = row_of_sum(e), col = 32 * own_half() + 16 * i + col_of_sum(n, e);
            float since = since_start(gates, row), of_key = gates.scales[1][row];
            z[i][n][e] *= since * gates.scales[0][row];
            x[i][n][e] *= -since * of_key * weight_of(gates, row);
            float end = h[i][n][e] * to_end(gates, row);
            if (row == chunk.rows - 1) last[i][n][e % 2] = end, end = 0.0f;
            at_end = fmaf(of_key * widen_bf16(shared.keys[row * KeyPartTile::STRIDE + col]), end, at_end);
            h[i][n][e] = end * of_key;
          }
#pragma unroll 1
      for (int block = 0; block < 4; block++) {
        if (block <= own_rows()) {
          add_pair_product<false>(z, shared.pairs.f, block, shared.keys);
          add_pair_product<false>(x, shared.pairs.e, block, shared.keys);
        }
        if (block >= own_rows()) {
          add_pair_product<true>(h, shared.pairs.f, block, shared.queries);
          add_pair_product<true>(h, shared.pairs.e, block, shared.keys);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            int row = row_of_sum(2 * r), col = 32 * own_half() + 16 * i + col_of_sum(n, 0);
            float of_query = gates.scales[0][row], of_key = gates.scales[1][row], beta = gates.beta[row], own = shared.own[row];
            i64 at = (row_of(of, chunk.first + row) * of.values + blockIdx.y) * 2 * of.key_dim + k0 + col;
            float d_query[2], d_key[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
              float q = of_query * widen_bf16(shared.queries[row * KeyPartTile::STRIDE + col + j]);
              float k = of_key * widen_bf16(shared.keys[row * KeyPartTile::STRIDE + col + j]);
              float of_z = z[i][n][2 * r + j] / of_query, of_x = x[i][n][2 * r + j] / (of_key * weight_of(gates, row));
              float of_h = h[i][n][2 * r + j] / of_key;
              of_q[r] = fmaf(q, of_z, of_q[r]), of_c[r] = fmaf(k, of_x, of_c[r]), of_k[r] = fmaf(k, of_h, of_k[r]);
              float d_k = fmaf(beta, of_x, of_h) + (row == chunk.rows - 1 ? last[i][n][j] : 0.0f);
              d_query[j] = fmaf(own, k, of_z), d_key[j] = fmaf(own, q, d_k);
            }
            int left = row < chunk.rows ? (int)of.key_dim - k0 - col : 0;
            store_two(d_keys + at, left, d_query);
            store_two(d_keys + at + of.key_dim, left, d_key);
          }
    }
    at_end = block_sum(at_end, shared.parts[0]);
    of_states = block_sum(of_states, shared.parts[1]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int row = row_of_sum(2 * r);
      float q = combine_row<Cores>(of_q[r], plus), c = combine_row<Cores>(of_c[r], plus), k = combine_row<Cores>(of_k[r], plus);
      if (threadIdx.x % 4 == 0) {
        float(&to)[3][ROWS] = shared.by_half[own_half()];
        to[0][row] = q, to[1][row] = c, to[2][row] = k;
      }
    }
    __syncthreads();
    int row = threadIdx.x;
    if (row < chunk.rows) {
      const float(&low)[3][ROWS] = shared.by_half[0];
      const float(&high)[3][ROWS] = shared.by_half[1];
      float c = low[1][row] + high[1][row];
      float last = row == chunk.rows - 1 ? fmaf(exp2_fast(gates.sums[ROWS - 1]), of_states, at_end) : 0.0f;
      shared.sums[row] = fmaf(gates.beta[row], c, low[0][row] + high[0][row]) - (low[2][row] + high[2][row]) + last;
      d_gates[at_gate(of, chunk.first + row, 0)] = c + shared.of_v[row];
    }
    __syncthreads();
    if (row < chunk.rows) {
      float sum = 0.0f;
      for (int i = chunk.rows - 1; i >= row; i--) sum += shared.sums[i];
      d_gates[at_gate(of, chunk.first + row, 1)] = sum;
    }
    __syncthreads();
  }
}

KERNEL(256) delta_rule_gradients_mma(const void* qkv, const float* gates, const float* states, const void* d_out, const float* v,
                                     const float* d_r, const float* d_states, float* d_gates, float* d_keys, u32,
                                     DELTA_PARAMETERS) {
  if constexpr (Cores::HERE) gradients_on_cores(qkv, gates, states, d_out, v, d_r, d_states, d_gates, d_keys, DELTA);
}
