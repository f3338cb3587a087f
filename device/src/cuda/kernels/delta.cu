// The gated delta rule in chunks, in fp32 on plain cores. cpu/kernels/delta/rule.rs and rule/backward.rs have the formulas and their
// names. delta_mma.cu and delta_mma_gradients.cu have the kernels for tensor cores.

#include "delta.cuh"

const int STRIP = 16;  // columns of keys, or of values, at a time

struct Rule {
  float beta[ROWS], sums[ROWS];       // b, and G: running sums of g
  float scales[2][ROWS];              // what makes queries and keys those of the rule
  float tiles[2][ROWS][STRIP + 1];     // columns of queries and of keys
};
INLINE float between(const Rule& rule, int i, int j) { return exponential(rule.sums[i] - rule.sums[j]); }
INLINE float since_start(const Rule& rule, int row) { return exponential(rule.sums[row]); }
INLINE float to_end(const Rule& rule, int row) { return exponential(rule.sums[ROWS - 1] - rule.sums[row]); }

// Reads gates, and the lengths of queries and keys. The rule may be used after the call, and before it by no thread.
INLINE void read_rule(const Delta& of, const Chunk& chunk, const void* qkv, u32 type, const float* gates, Rule& rule) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float own = 0.0f;
  if (threadIdx.x < ROWS) {
    bool has = (int)threadIdx.x < chunk.rows;
    rule.beta[threadIdx.x] = has ? gates[at_gate(of, chunk.first + threadIdx.x, 0)] : 0.0f;
    rule.sums[threadIdx.x] = has ? gates[at_gate(of, chunk.first + threadIdx.x, 1)] : 0.0f;
  }
  for (int i = warp; i < 2 * ROWS; i += 8) {
    int part = i / ROWS, row = i % ROWS;
    if (row >= chunk.rows) {
      if (lane == 0) rule.scales[part][row] = 0.0f;
      continue;
    }
    float square = 0.0f;
    i64 at = at_key(of, chunk.first + row, part);
    for (u32 col = lane; col < of.key_dim; col += 32) {
      float x = load1(qkv, type, at + col);
      square = fmaf(x, x, square);
    }
    square = warp_combine(square, 32, plus);
    float scale = part == 0 ? 1.0f / sqrtf((float)of.key_dim) : 1.0f;
    if (lane == 0) rule.scales[part][row] = 1.0f / sqrtf(square + 1e-6f) * scale;
  }
  __syncthreads();
  if (threadIdx.x < ROWS)
    for (u32 i = 0; i <= threadIdx.x; i++) own += rule.sums[i];
  __syncthreads();
  if (threadIdx.x < ROWS) rule.sums[threadIdx.x] = own;
  __syncthreads();
}

// Reads columns first.. of queries and keys. Barriers before and after it are the caller's.
INLINE void read_tiles(const Delta& of, const Chunk& chunk, const void* qkv, u32 type, u32 first, Rule& rule) {
  for (int i = threadIdx.x; i < 2 * ROWS * STRIP; i += 256) {
    int part = i / (ROWS * STRIP), row = i / STRIP % ROWS;
    u32 col = first + i % STRIP;
    bool has = row < chunk.rows && col < of.key_dim;
    float x = has ? load1(qkv, type, at_key(of, chunk.first + row, part) + col) : 0.0f;
    rule.tiles[part][row][i % STRIP] = x * rule.scales[part][row];
  }
}

// Pairs of rows: a thread has rows tid / 16 + 16 i and columns tid % 16 + 16 j.
INLINE void add_pairs(const float (&left)[ROWS][STRIP + 1], const float (&right)[ROWS][STRIP + 1], int col, float (&sums)[4][4]) {
  float x[4], y[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = left[threadIdx.x / 16 + 16 * i][col], y[i] = right[threadIdx.x % 16 + 16 * i][col];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
}
// Stores f(row, column, sum) below the diagonal, and on it if `diagonal` is 1; 0 elsewhere.
template <class F>
INLINE void store_pairs(const float (&sums)[4][4], int diagonal, Pairs& pairs, F f) {
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int row = threadIdx.x / 16 + 16 * i, col = threadIdx.x % 16 + 16 * j;
      pairs[row][col] = col < row + diagonal ? f(row, col, sums[i][j]) : 0.0f;
    }
}

// Columns of values: a thread has rows tid / 32 + 8 m of column tid % 32.
template <class F>
INLINE void each_row(F f) {
#pragma unroll
  for (int m = 0; m < 8; m++) f(m, (int)threadIdx.x / 32 + 8 * m);
}

// A state's columns of this block: element (k, c) of a thread has c = tid % 32 and k = tid / 32 + 8 i.
INLINE u32 padded_keys(const Delta& of) { return (of.key_dim + STRIP - 1) / STRIP * STRIP; }
template <class F>
INLINE void each_of_state(const Delta& of, F f) {
  for (u32 k = threadIdx.x / 32; k < padded_keys(of); k += 8) f(k, k * COLUMNS + threadIdx.x % 32);
}

struct Forward {
  Rule rule;
  Pairs pairs;
  Columns v;
  float state[1];  // (padded keys, COLUMNS)
};

// out, and the states before chunks that continue a document. `initial` has those before the samples; null: they are 0. Blocks are
// (columns of values, head, sample).
KERNEL(256) delta_rule(const void* qkv, const float* gates, void* out, float* states, const float* initial, u32 types,
                       DELTA_PARAMETERS) {
  DYNAMIC_SHARED(dynamic);
  Forward& shared = *(Forward*)dynamic;
  Rule& rule = shared.rule;
  float* state = shared.state;
  Delta of = DELTA;
  u32 tx = threadIdx.x % 32, col = blockIdx.x * COLUMNS + tx;
  bool has_column = col < value_dim;
  each_of_state(of, [&](u32 k, u32) {
    for (int place = 0; place * ROWS < (int)seq_len; place++)
      if (has_column && k < key_dim) states[at_state(of, place * ROWS) + (i64)k * value_dim + col] = 0.0f;
  });
  for (int first = 0; first < (int)seq_len;) {
    Chunk chunk = chunk_from(of, first);
    first += chunk.rows;
    i64 place = at_state(of, chunk.first);
    each_of_state(of, [&](u32 k, u32 i) {
      if (chunk.is_first) {
        bool has = initial && chunk.first == 0 && has_column && k < key_dim;
        state[i] = has ? initial[at_initial(of) + (i64)k * value_dim + col] : 0.0f;
      } else if (has_column && k < key_dim) states[place + (i64)k * value_dim + col] = state[i];
    });
    read_rule(of, chunk, qkv, type_of(types, 0), gates, rule);
    float a[4][4] = {}, w[8] = {};
    for (u32 k = 0; k < key_dim; k += STRIP) {
      __syncthreads();
      read_tiles(of, chunk, qkv, type_of(types, 0), k, rule);
      __syncthreads();
#pragma unroll 1
      for (int c = 0; c < STRIP; c++) {
        add_pairs(rule.tiles[1], rule.tiles[1], c, a);
        float s = state[(k + c) * COLUMNS + tx];
        each_row([&](int m, int row) { w[m] = fmaf(rule.tiles[1][row][c], s, w[m]); });
      }
    }
    each_row([&](int m, int row) {
      bool has = row < chunk.rows && has_column;
      float own = has ? load1(qkv, type_of(types, 0), at_value(of, chunk.first + row) + col) : 0.0f;
      shared.v[row][tx] = rule.beta[row] * fmaf(-since_start(rule, row), w[m], own);
    });
    store_pairs(a, 0, shared.pairs, [&](int i, int j, float x) { return x * rule.beta[i] * between(rule, i, j); });
    __syncthreads();
    solve(shared.pairs, shared.v, chunk.rows, false);
    // Queries and keys are read again, since all sums at once do not fit into the registers.
    float p[4][4] = {}, o[8] = {};
    for (u32 k = 0; k < key_dim; k += STRIP) {
      __syncthreads();
      read_tiles(of, chunk, qkv, type_of(types, 0), k, rule);
      __syncthreads();
#pragma unroll 1
      for (int c = 0; c < STRIP; c++) {
        add_pairs(rule.tiles[0], rule.tiles[1], c, p);
        float s = state[(k + c) * COLUMNS + tx];
        each_row([&](int m, int row) { o[m] = fmaf(rule.tiles[0][row][c], s, o[m]); });
      }
    }
    store_pairs(p, 1, shared.pairs, [&](int i, int j, float x) { return x * between(rule, i, j); });
    __syncthreads();
    each_row([&](int m, int row) { o[m] *= since_start(rule, row); });
#pragma unroll 2
    for (int j = 0; j < chunk.rows; j++) {
      float v = shared.v[j][tx];
      each_row([&](int m, int row) { o[m] = fmaf(shared.pairs[row][j], v, o[m]); });
    }
    each_row([&](int m, int row) {
      if (row < chunk.rows && has_column) store1(out, type_of(types, 1), at_out(of, chunk.first + row) + col, o[m]);
    });
    if (!chunk.is_last) {
      __syncthreads();
      each_row([&](int, int row) { shared.v[row][tx] *= to_end(rule, row); });
      float decay = exponential(rule.sums[ROWS - 1]);
      for (u32 k = 0; k < key_dim; k += STRIP) {
        __syncthreads();
        read_tiles(of, chunk, qkv, type_of(types, 0), k, rule);
        __syncthreads();
#pragma unroll 1
        for (u32 c = threadIdx.x / 32; c < STRIP; c += 8) {
          float s = state[(k + c) * COLUMNS + tx] * decay;
#pragma unroll 2
          for (int j = 0; j < ROWS; j++) s = fmaf(rule.tiles[1][j][c], shared.v[j][tx], s);
          state[(k + c) * COLUMNS + tx] = s;
        }
      }
    }
    __syncthreads();
  }
}

struct Backward {
  Rule rule;
  Pairs pairs;
  Columns v, d;
  float d_state[1];  // (padded keys, COLUMNS)
};

// From the last chunk to the first: V and d_r (B T, H e), d_v, and the gradients of the states before chunks that continue a
// document, in their places. Blocks as of delta_rule.
KERNEL(256) delta_rule_states(const void* qkv, const float* gates, const float* states, const void* d_out, void* d_qkv, float* v,
                              float* d_r, float* d_states, u32 types, DELTA_PARAMETERS) {
  DYNAMIC_SHARED(dynamic);
  Backward& shared = *(Backward*)dynamic;
  Rule& rule = shared.rule;
  float* d_state = shared.d_state;
  Delta of = DELTA;
  u32 tx = threadIdx.x % 32, col = blockIdx.x * COLUMNS + tx;
  bool has_column = col < value_dim;
  for (int end = seq_len; end > 0;) {
    Chunk chunk = chunk_before(of, end);
    end = chunk.first;
    i64 place = at_state(of, chunk.first);
    if (chunk.is_last) each_of_state(of, [&](u32, u32 i) { d_state[i] = 0.0f; });
    read_rule(of, chunk, qkv, type_of(types, 0), gates, rule);
    float a[4][4] = {}, w[8] = {};
    for (u32 k = 0; k < key_dim; k += STRIP) {
      __syncthreads();
      read_tiles(of, chunk, qkv, type_of(types, 0), k, rule);
#pragma unroll 1
      for (u32 c = threadIdx.x / 32; c < STRIP; c += 8) {
        bool has = !chunk.is_first && has_column && k + c < key_dim;
        shared.d[c][tx] = has ? states[place + (i64)(k + c) * value_dim + col] : 0.0f;
      }
      __syncthreads();
#pragma unroll 1
      for (int c = 0; c < STRIP; c++) {
        add_pairs(rule.tiles[1], rule.tiles[1], c, a);
        float s = shared.d[c][tx];
        each_row([&](int m, int row) { w[m] = fmaf(rule.tiles[1][row][c], s, w[m]); });
      }
    }
    auto weigh = [&](int i, int j, float x) { return x * rule.beta[i] * between(rule, i, j); };
    each_row([&](int m, int row) {
      bool has = row < chunk.rows && has_column;
      float own = has ? load1(qkv, type_of(types, 0), at_value(of, chunk.first + row) + col) : 0.0f;
      shared.v[row][tx] = rule.beta[row] * fmaf(-since_start(rule, row), w[m], own);
    });
    store_pairs(a, 0, shared.pairs, weigh);
    __syncthreads();
    solve(shared.pairs, shared.v, chunk.rows, false);
    // Queries and keys are read again, since all sums at once do not fit into the registers.
    float p[4][4] = {}, d[8] = {};
    for (u32 k = 0; k < key_dim; k += STRIP) {
      __syncthreads();
      read_tiles(of, chunk, qkv, type_of(types, 0), k, rule);
      __syncthreads();
#pragma unroll 1
      for (int c = 0; c < STRIP; c++) {
        add_pairs(rule.tiles[0], rule.tiles[1], c, p);
        float d_s = d_state[(k + c) * COLUMNS + tx];
        each_row([&](int m, int row) { d[m] = fmaf(rule.tiles[1][row][c], d_s, d[m]); });
      }
    }
    each_row([&](int, int row) {
      bool has = row < chunk.rows && has_column;
      i64 at = at_out(of, chunk.first + row) + col;
      if (has) v[at] = shared.v[row][tx];
      shared.d[row][tx] = has ? load1(d_out, type_of(types, 1), at) : 0.0f;
    });
    store_pairs(p, 1, shared.pairs, [&](int i, int j, float x) { return x * between(rule, i, j); });
    __syncthreads();
    each_row([&](int m, int row) { d[m] *= to_end(rule, row); });
#pragma unroll 2
    for (int i = 0; i < chunk.rows; i++) {
      float d_o = shared.d[i][tx];
      each_row([&](int m, int row) { d[m] = fmaf(shared.pairs[i][row], d_o, d[m]); });
    }
    __syncthreads();
    store_pairs(a, 0, shared.pairs, weigh);
    each_row([&](int m, int row) { shared.v[row][tx] = row < chunk.rows ? d[m] : 0.0f; });
    __syncthreads();
    solve(shared.pairs, shared.v, chunk.rows, true);
    __syncthreads();
    each_row([&](int, int row) {
      float r = shared.v[row][tx], beta = rule.beta[row], decay = since_start(rule, row);
      if (row < chunk.rows && has_column) {
        d_r[at_out(of, chunk.first + row) + col] = r;
        store1(d_qkv, type_of(types, 2), at_value(of, chunk.first + row) + col, beta * r);
      }
      shared.v[row][tx] = -decay * beta * r;
      shared.d[row][tx] *= decay;
    });
    if (!chunk.is_first) {
      float decay = exponential(rule.sums[ROWS - 1]);
      for (u32 k = 0; k < key_dim; k += STRIP) {
        __syncthreads();
        read_tiles(of, chunk, qkv, type_of(types, 0), k, rule);
        __syncthreads();
#pragma unroll 1
        for (u32 c = threadIdx.x / 32; c < STRIP; c += 8) {
          float s = d_state[(k + c) * COLUMNS + tx] * decay;
#pragma unroll 2
          for (int j = 0; j < ROWS; j++) {
            s = fmaf(rule.tiles[0][j][c], shared.d[j][tx], s);
            s = fmaf(rule.tiles[1][j][c], shared.v[j][tx], s);
          }
          d_state[(k + c) * COLUMNS + tx] = s;
          if (has_column && k + c < key_dim) d_states[place + (i64)(k + c) * value_dim + col] = s;
        }
      }
    }
    __syncthreads();
  }
}

struct Gradients {
  Rule rule;
  Pairs f, e;
  float values[3][ROWS][STRIP + 1];    // columns of d_out, d_r and V
  float states[2][STRIP][STRIP + 1];    // of the state and of the gradient of the state after the chunk
  float own[ROWS];                    // products of d_out and V of the same row
  float sums[ROWS], parts[2][32];
};

// Reads columns first.. of d_out, d_r and V.
INLINE void read_values(const Delta& of, const Chunk& chunk, const void* d_out, u32 type, const float* d_r, const float* v,
                        u32 first, Gradients& shared) {
  for (int i = threadIdx.x; i < ROWS * STRIP; i += 256) {
    int row = i / STRIP;
    u32 col = first + i % STRIP;
    bool has = row < chunk.rows && col < of.value_dim;
    i64 at = at_out(of, chunk.first + row) + col;
    shared.values[0][row][i % STRIP] = has ? load1(d_out, type, at) : 0.0f;
    shared.values[1][row][i % STRIP] = has ? d_r[at] : 0.0f;
    shared.values[2][row][i % STRIP] = has ? v[at] : 0.0f;
  }
}

// Gradients of the gates, and those of queries and keys as the rule has them: d_keys (B T, H, 2, d). Blocks are (run of 64 rows, head,
// sample), and a block has the chunks that start in its run.
KERNEL(256) delta_rule_gradients(const void* qkv, const float* gates, const float* states, const void* d_out, const float* v,
                                 const float* d_r, const float* d_states, float* d_gates, float* d_keys, u32 types,
                                 DELTA_PARAMETERS) {
  DYNAMIC_SHARED(dynamic);
  Gradients& shared = *(Gradients*)dynamic;
  Rule& rule = shared.rule;
  Delta of = DELTA;
  int tx = threadIdx.x % 16, ty = threadIdx.x / 16, run = blockIdx.x * ROWS;
  int first = run - (run - document_of(of, run)) % ROWS;
  if (first < run) first += chunk_from(of, first).rows;
  while (first < run + ROWS && first < (int)seq_len) {
    Chunk chunk = chunk_from(of, first);
    first += chunk.rows;
    i64 before = at_state(of, chunk.first), after = at_state(of, chunk.first + chunk.rows);
    read_rule(of, chunk, qkv, type_of(types, 0), gates, rule);
    // Products of d_out and V, of d_r and V, and of d_r and v.
    float a[4][4] = {}, p[4][4] = {}, of_v[4] = {};
    for (u32 c0 = 0; c0 < value_dim; c0 += STRIP) {
      __syncthreads();
      read_values(of, chunk, d_out, type_of(types, 1), d_r, v, c0, shared);
      __syncthreads();
#pragma unroll 2
      for (int c = 0; c < STRIP; c++) {
        add_pairs(shared.values[0], shared.values[2], c, a);
        add_pairs(shared.values[1], shared.values[2], c, p);
      }
      for (int m = 0; m < 4; m++) {
        int row = ty + 16 * m;
        bool has = row < chunk.rows && c0 + tx < value_dim;
        float own = has ? load1(qkv, type_of(types, 0), at_value(of, chunk.first + row) + c0 + tx) : 0.0f;
        of_v[m] = fmaf(shared.values[1][row][tx], own, of_v[m]);
      }
    }
    store_pairs(a, 0, shared.f, [&](int i, int j, float x) { return x * between(rule, i, j); });
#pragma unroll
    for (int m = 0; m < 4; m++)
      if (tx == ty) shared.own[ty + 16 * m] = a[m][m];
    store_pairs(p, 0, shared.e, [&](int i, int j, float x) { return -x * between(rule, i, j); });
    // Products with queries and keys, and of the state and its gradient.
    float of_q[4] = {}, of_c[4] = {}, of_k[4] = {}, at_end = 0.0f, of_states = 0.0f;
    for (u32 k0 = 0; k0 < key_dim; k0 += STRIP) {
      float z[4] = {}, x[4] = {}, h[4] = {}, last = 0.0f;
      for (u32 c0 = 0; c0 < value_dim; c0 += STRIP) {
        __syncthreads();
        if (c0 == 0) read_tiles(of, chunk, qkv, type_of(types, 0), k0, rule);
        read_values(of, chunk, d_out, type_of(types, 1), d_r, v, c0, shared);
        bool has = k0 + ty < key_dim && c0 + tx < value_dim;
        i64 at = (i64)(k0 + ty) * value_dim + c0 + tx;
        float s = has && !chunk.is_first ? states[before + at] : 0.0f;
        float d_s = has && !chunk.is_last ? d_states[after + at] : 0.0f;
        shared.states[0][ty][tx] = s, shared.states[1][ty][tx] = d_s;
        of_states = fmaf(s, d_s, of_states);
        __syncthreads();
#pragma unroll 2
        for (int c = 0; c < STRIP; c++) {
          float of_s = shared.states[0][tx][c], of_d = shared.states[1][tx][c];
#pragma unroll
          for (int m = 0; m < 4; m++) {
            z[m] = fmaf(shared.values[0][ty + 16 * m][c], of_s, z[m]);
            x[m] = fmaf(shared.values[1][ty + 16 * m][c], of_s, x[m]);
            h[m] = fmaf(shared.values[2][ty + 16 * m][c], of_d, h[m]);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < 4; m++) {
        int row = ty + 16 * m;
        z[m] *= since_start(rule, row), x[m] *= -since_start(rule, row), h[m] *= to_end(rule, row);
        if (row == chunk.rows - 1) last = h[m], h[m] = 0.0f;
        at_end = fmaf(rule.tiles[1][row][tx], h[m], at_end);
      }
#pragma unroll 2
      for (int j = 0; j < chunk.rows; j++) {
        float of_query = rule.tiles[0][j][tx], of_key = rule.tiles[1][j][tx], weighed = rule.beta[j] * of_key;
#pragma unroll
        for (int m = 0; m < 4; m++) {
          int row = ty + 16 * m;
          z[m] = fmaf(shared.f[row][j], of_key, z[m]);
          x[m] = fmaf(shared.e[row][j], of_key, x[m]);
          h[m] = fmaf(shared.f[j][row], of_query, h[m]);
          h[m] = fmaf(shared.e[j][row], weighed, h[m]);
        }
      }
#pragma unroll
      for (int m = 0; m < 4; m++) {
        int row = ty + 16 * m;
        of_q[m] = fmaf(rule.tiles[0][row][tx], z[m], of_q[m]);
        of_c[m] = fmaf(rule.tiles[1][row][tx], x[m], of_c[m]);
        of_k[m] = fmaf(rule.tiles[1][row][tx], h[m], of_k[m]);
        if (row < chunk.rows && k0 + tx < key_dim) {
          i64 at = (row_of(of, chunk.first + row) * values + blockIdx.y) * 2 * key_dim + k0 + tx;
          float own = shared.own[row], d_k = fmaf(rule.beta[row], x[m], h[m]) + (row == chunk.rows - 1 ? last : 0.0f);
          d_keys[at] = fmaf(own, rule.tiles[1][row][tx], z[m]);
          d_keys[at + key_dim] = fmaf(own, rule.tiles[0][row][tx], d_k);
        }
      }
    }
    at_end = block_sum(at_end, shared.parts[0]);
    of_states = block_sum(of_states, shared.parts[1]);
#pragma unroll
    for (int m = 0; m < 4; m++) {
      int row = ty + 16 * m;
      float c = warp_combine(of_c[m], 16, plus), q = warp_combine(of_q[m], 16, plus), k = warp_combine(of_k[m], 16, plus);
      float d_beta = c + warp_combine(of_v[m], 16, plus);
      if (tx == 0 && row < chunk.rows) {
        float last = row == chunk.rows - 1 ? fmaf(exponential(rule.sums[ROWS - 1]), of_states, at_end) : 0.0f;
        shared.sums[row] = fmaf(rule.beta[row], c, q) - k + last;
        d_gates[at_gate(of, chunk.first + row, 0)] = d_beta;
      }
    }
    __syncthreads();
    if ((int)threadIdx.x < chunk.rows) {
      float sum = 0.0f;
      for (int row = chunk.rows - 1; row >= (int)threadIdx.x; row--) sum += shared.sums[row];
      d_gates[at_gate(of, chunk.first + threadIdx.x, 1)] = sum;
    }
    __syncthreads();
  }
}

// Gradients of the queries and keys of qkv, from those of all heads that share them. A warp has a query or a key of a row.
KERNEL(256) delta_rule_keys(const void* qkv, const float* d_keys, void* d_qkv, u32 types, i64 rows, u32 keys, u32 values,
                            u32 key_dim, u32 value_dim) {
  i64 unit = (i64)blockIdx.x * 8 + threadIdx.x / 32;
  if (unit >= rows * 2 * keys) return;
  u32 lane = threadIdx.x % 32, group = values / keys;
  i64 row = unit / (2 * keys);
  u32 part = unit / keys % 2, head = unit % keys;
  i64 at = row * (2 * keys * key_dim + values * value_dim) + (part * keys + head) * key_dim;
  float x[4], d[4], square = 0.0f, along = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 col = lane + 32 * i;
    x[i] = col < key_dim ? load1(qkv, type_of(types, 0), at + col) : 0.0f;
    d[i] = 0.0f;
    if (col < key_dim)
      for (u32 of = 0; of < group; of++) d[i] += d_keys[((row * values + head * group + of) * 2 + part) * key_dim + col];
    square = fmaf(x[i], x[i], square);
    along = fmaf(x[i], d[i], along);
  }
  float inverse = 1.0f / sqrtf(warp_combine(square, 32, plus) + 1e-6f);
  along = warp_combine(along, 32, plus) * inverse;
  float scale = part == 0 ? inverse / sqrtf((float)key_dim) : inverse;
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (lane + 32 * i < key_dim)
      store1(d_qkv, type_of(types, 1), at + lane + 32 * i, fmaf(-along, x[i] * inverse, d[i]) * scale);
}
