// The gated delta rule on tensor cores: the rule, and the gradients of its states and values.

#include "delta_mma.cuh"

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
