// The gated delta rule on tensor cores: the gradients of queries, keys and gates.

#include "delta_mma.cuh"

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
