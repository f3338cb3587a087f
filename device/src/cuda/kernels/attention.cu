// Causal attention in fp32 for every type and GPU: tiles of 64 queries by 64 keys, products in
// shared memory, softmax by a running maximum. A block has 256 threads; thread (ty, tx) of 16 x 16
// has rows 4 ty + i and columns tx + 16 j of a tile. The backward pass recomputes the weights from
// lse. It has one kernel by queries and one by keys: no sum depends on the order in which blocks
// run.

#define TILE 64
#define DEPTH 16

// to (64, DEPTH) = columns from..from + DEPTH of the first 64 rows; 0 outside. Half of the threads
// load it.
typedef float Slab[TILE][DEPTH + 1];
INLINE void load_slab(Slab& to, const Rows& rows, int from) {
  int row = threadIdx.x / 2 % TILE, col = threadIdx.x % 2 * 8;
  int count = row < rows.rows ? rows.width - from - col : 0;
  count = count < 0 ? 0 : count < 8 ? count : 8;
  float v[8];
  load8(rows.x, rows.type, rows.start + row * rows.stride + from + col, count, v);
#pragma unroll
  for (int j = 0; j < 8; j++) to[row][col + j] = v[j];
}

// A tile of weights, or of their gradients. A warp reads and writes rows that are 4 apart: the padding puts them in different
// banks.
typedef float Weights[TILE][TILE + 4];

// Loads two slabs at once, one with each half of the block.
INLINE void load_slabs(Slab& a, const Rows& rows_a, Slab& b, const Rows& rows_b, int from) {
  if (threadIdx.x < 128) load_slab(a, rows_a, from);
  else load_slab(b, rows_b, from);
}

// sums (64, 64) += a b' over the slab.
INLINE void multiply_slabs(float (&sums)[4][4], const Slab& a, const Slab& b) {
  int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll 4
  for (int d = 0; d < DEPTH; d++) {
    float x[4], y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = a[4 * ty + i][d], y[i] = b[tx + 16 * i][d];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
  }
}

// sums (64, D) += w (64, 64) or its transpose times the first 64 rows; N columns per thread, D <=
// 16 N. `panel` has room for DEPTH rows. A barrier precedes each write of the panel; w may be read
// right after the first barrier.
template <int N, bool TRANSPOSED>
INLINE void multiply_rows(float (&sums)[4][N], const Weights& w, float* panel, const Rows& rows) {
  int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  for (int from = 0; from < TILE && from < rows.rows; from += DEPTH) {
    __syncthreads();
    for (int col = 8 * tx; col < 16 * N; col += 128) {
      int row = from + ty, count = row < rows.rows ? rows.width - col : 0;
      count = count < 0 ? 0 : count < 8 ? count : 8;
      float v[8];
      load8(rows.x, rows.type, rows.start + row * rows.stride + col, count, v);
#pragma unroll
      for (int j = 0; j < 8; j++) panel[ty * 16 * N + col + j] = v[j];
    }
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < DEPTH; k++) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = TRANSPOSED ? w[from + k][4 * ty + i] : w[4 * ty + i][from + k];
#pragma unroll
      for (int j = 0; j < N; j++) {
        float y = panel[k * 16 * N + tx + 16 * j];
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i][j] = fmaf(x[i], y, sums[i][j]);
      }
    }
  }
}

// y (64, D) = sums times each row's factor, for existing rows.
template <int N>
INLINE void store_rows(const float (&sums)[4][N], const float (&factors)[4], void* y, u32 type, i64 start, i64 stride,
                       int rows, int width) {
  int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < N; j++)
      if (4 * ty + i < rows && tx + 16 * j < width)
        store1(y, type, start + (4 * ty + i) * stride + tx + 16 * j, sums[i][j] * factors[i]);
}

// What factor_of_score makes the score of a product q k': with a cap the score itself.
INLINE float capped(const Head& head, float product) {
  return head.cap == 0.0f ? product : head.cap * tanh_of(product * inner_of_cap(head));
}
INLINE float factor_of_score(const Head& head) { return head.cap == 0.0f ? head.scale : 1.0f; }

// The first tile of keys that a tile of queries sees.
INLINE int first_tile(const Head& head, int query) { return start_of(head, query) / TILE * TILE; }

template <int N>
INLINE void forward(const void* qkv, void* out, float* lse, u32 types, const Head& head) {
  __shared__ Slab slabs[2];
  __shared__ Weights weights;
  __shared__ float panel[DEPTH * 16 * N];
  int ty = threadIdx.x / 16, tx = threadIdx.x % 16, t = head.seq_len;
  // The longest rows come first.
  int query = TILE * (gridDim.x - 1 - blockIdx.x);
  Rows q = rows_of_qkv(qkv, type_of(types, 0), head, query, 0);
  float sums[4][N] = {}, top[4], total[4] = {0, 0, 0, 0}, factor = factor_of_score(head);
  int start[4];
#pragma unroll
  for (int i = 0; i < 4; i++) top[i] = -__int_as_float(0x7f800000), start[i] = start_of(head, query + 4 * ty + i);
  for (int key = first_tile(head, query); key <= query; key += TILE) {
    Rows k = rows_of_qkv(qkv, type_of(types, 0), head, key, 1), v = k;
    v.start += head.kv_count * head.dim;
    float s[4][4] = {};
    for (int from = 0; from < (int)head.dim; from += DEPTH) {
      __syncthreads();
      load_slabs(slabs[0], q, slabs[1], k, from);
      __syncthreads();
      multiply_slabs(s, slabs[0], slabs[1]);
    }
    // In the loop below the caps would take registers that there are not.
    if (head.cap != 0.0f) {
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) s[i][j] = capped(head, s[i][j]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = query + 4 * ty + i;
      float high = top[i];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int column = key + tx + 16 * j;
        if (column > row || column < start[i]) s[i][j] = -__int_as_float(0x7f800000);
        high = fmaxf(high, s[i][j]);
      }
      high = warp_combine(high, 16, larger);
      // A row has seen no key yet where its document starts in a later tile.
      float from = finite_or_zero(high), shrink = exponential((top[i] - from) * factor);
      top[i] = high;
      total[i] *= shrink;
#pragma unroll
      for (int j = 0; j < N; j++) sums[i][j] *= shrink;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int column = tx + 16 * j;
        float w = exponential((s[i][j] - from) * factor);
        total[i] += w;
        weights[4 * ty + i][column] = masked(head.mask, mask_index(head, row, key + column), w);
      }
    }
    multiply_rows<N, false>(sums, weights, panel, v);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    total[i] = warp_combine(total[i], 16, plus);
    int row = query + 4 * ty + i;
    if (tx == 0 && row < t) lse[at_lse(head, row)] = fmaf(top[i], factor, logf(total[i]));
    total[i] = 1.0f / total[i];
  }
  store_rows<N>(sums, total, out, type_of(types, 1), at_row(head, query), row_width(head), t - query, head.dim);
}

// For a tile of queries and keys: the weights (masked) and the gradients of the scores. Both are 0
// where the query does not see the key or does not exist.
INLINE void scores_backward(float (&w)[4][4], float (&d)[4][4], Slab (&slabs)[2], const Saved& saved,
                            const Head& head, int query, int key) {
  int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  Rows q = rows_of_qkv(saved.qkv, type_of(saved.types, 0), head, query, 0);
  Rows k = rows_of_qkv(saved.qkv, type_of(saved.types, 0), head, key, 1);
  Rows v = rows_of_qkv(saved.qkv, type_of(saved.types, 0), head, key, 2);
  Rows d_out = rows_of_out(saved.d_out, type_of(saved.types, 2), head, query);
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) w[i][j] = d[i][j] = 0.0f;
  for (int from = 0; from < (int)head.dim; from += DEPTH) {
    __syncthreads();
    load_slabs(slabs[0], q, slabs[1], k, from);
    __syncthreads();
    multiply_slabs(w, slabs[0], slabs[1]);
    __syncthreads();
    load_slabs(slabs[0], d_out, slabs[1], v, from);
    __syncthreads();
    multiply_slabs(d, slabs[0], slabs[1]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = query + 4 * ty + i;
    bool exists = row < (int)head.seq_len;
    int start = start_of(head, row);
    float row_lse = exists ? saved.lse[at_lse(head, row)] : 0.0f, row_delta = exists ? saved.delta[at_lse(head, row)] : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int column = key + tx + 16 * j;
      bool seen = exists && column <= row && column >= start;
      float score = capped(head, w[i][j]), slope = head.cap == 0.0f ? 1.0f : cap_slope(score, head.cap);
      float weight = exponential(fmaf(score, factor_of_score(head), -row_lse));
      float factor = masked(head.mask, mask_index(head, row, column), 1.0f);
      d[i][j] = seen ? weight * fmaf(d[i][j], factor, -row_delta) * head.scale * slope : 0.0f;
      w[i][j] = seen ? weight * factor : 0.0f;
    }
  }
}

INLINE void keep_tile(Weights& to, const float (&x)[4][4]) {
  int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) to[4 * ty + i][tx + 16 * j] = x[i][j];
}

// delta (B, H, T) = sums over a head's columns of d_out out. A warp has one token.
KERNEL(256) attention_delta(const void* out, const void* d_out, float* delta, u32 types, u32 count, u32 seq_len,
                            u32 dim, i64 tokens) {
  i64 unit = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  i64 token = unit / count, head = unit % count;
  if (token >= tokens) return;
  i64 at = unit * dim;
  float sum = 0.0f;
  for (int col = threadIdx.x % 32; col < (int)dim; col += 32)
    sum = fmaf(load1(out, type_of(types, 1), at + col), load1(d_out, type_of(types, 2), at + col), sum);
  sum = warp_combine(sum, 32, plus);
  if (threadIdx.x % 32 == 0) delta[(token / seq_len * count + head) * seq_len + token % seq_len] = sum;
}

// d_q of a tile of queries, over the keys that they see.
template <int N>
INLINE void backward_queries(const Saved& saved, void* d_qkv, const Head& head) {
  __shared__ Slab slabs[2];
  __shared__ Weights tile;
  __shared__ float panel[DEPTH * 16 * N];
  int query = TILE * (gridDim.x - 1 - blockIdx.x);
  float d_q[4][N] = {};
  const float ones[4] = {1, 1, 1, 1};
  for (int key = first_tile(head, query); key <= query; key += TILE) {
    float w[4][4], d[4][4];
    scores_backward(w, d, slabs, saved, head, query, key);
    keep_tile(tile, d);
    multiply_rows<N, false>(d_q, tile, panel, rows_of_qkv(saved.qkv, type_of(saved.types, 0), head, key, 1));
  }
  store_rows<N>(d_q, ones, d_qkv, type_of(saved.types, 3), at_qkv(head, query, 0), qkv_width(head),
                head.seq_len - query, head.dim);
}

// d_k and d_v of a tile of keys, over the queries that see them. The heads that share the keys
// follow in turn.
template <int N>
INLINE void backward_keys(const Saved& saved, void* d_qkv, Head head) {
  __shared__ Slab slabs[2];
  __shared__ Weights tile;
  __shared__ float panel[DEPTH * 16 * N];
  int key = TILE * blockIdx.x, t = head.seq_len;
  float d_k[4][N] = {}, d_v[4][N] = {};
  const float ones[4] = {1, 1, 1, 1};
  u32 end = (blockIdx.y + 1) * group_size(head);
  head.shared = blockIdx.y;
  for (head.number = blockIdx.y * group_size(head); head.number < end; head.number++) {
    // Documents that start behind the keys see none of them, nor do those after.
    for (int query = key; query < t && start_of(head, query) < key + TILE; query += TILE) {
      float w[4][4], d[4][4];
      scores_backward(w, d, slabs, saved, head, query, key);
      keep_tile(tile, w);
      multiply_rows<N, true>(d_v, tile, panel, rows_of_out(saved.d_out, type_of(saved.types, 2), head, query));
      __syncthreads();
      keep_tile(tile, d);
      multiply_rows<N, true>(d_k, tile, panel, rows_of_qkv(saved.qkv, type_of(saved.types, 0), head, query, 0));
    }
  }
  i64 stride = qkv_width(head);
  store_rows<N>(d_k, ones, d_qkv, type_of(saved.types, 3), at_qkv(head, key, 1), stride, t - key, head.dim);
  store_rows<N>(d_v, ones, d_qkv, type_of(saved.types, 3), at_qkv(head, key, 2), stride, t - key, head.dim);
}

// Kernels by head dimension: up to 64, 128 and 256.
KERNEL(256) attention_64(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward<4>(qkv, out, lse, types, HEAD);
}
KERNEL(256) attention_128(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward<8>(qkv, out, lse, types, HEAD);
}
KERNEL(256) attention_256(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward<16>(qkv, out, lse, types, HEAD);
}

KERNEL(256) attention_queries_64(BACKWARD_PARAMETERS) { backward_queries<4>(SAVED, d_qkv, HEAD); }
KERNEL(256) attention_queries_128(BACKWARD_PARAMETERS) { backward_queries<8>(SAVED, d_qkv, HEAD); }
KERNEL(256) attention_queries_256(BACKWARD_PARAMETERS) { backward_queries<16>(SAVED, d_qkv, HEAD); }
KERNEL(256) attention_keys_64(BACKWARD_PARAMETERS) { backward_keys<4>(SAVED, d_qkv, HEAD); }
KERNEL(256) attention_keys_128(BACKWARD_PARAMETERS) { backward_keys<8>(SAVED, d_qkv, HEAD); }
KERNEL(256) attention_keys_256(BACKWARD_PARAMETERS) { backward_keys<16>(SAVED, d_qkv, HEAD); }

// Adds a key without a value, with the score sinks[h] of its head h, to the softmax with the sums `lse` (B, H, T) and the results `out`
// (tokens, H D). A warp has a token and a head.
KERNEL(256) attention_sinks(void* out, float* lse, const void* sinks, u32 types, u32 count, u32 seq_len, u32 dim, i64 tokens) {
  i64 unit = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  i64 token = unit / count, head = unit % count;
  if (token >= tokens) return;
  lse += (token / seq_len * count + head) * seq_len + token % seq_len;
  float sum = *lse, sink = load1(sinks, type_of(types, 1), head), share = sigmoid(sum - sink);
  for (int col = threadIdx.x % 32; col < (int)dim; col += 32)
    store1(out, type_of(types, 0), unit * dim + col, share * load1(out, type_of(types, 0), unit * dim + col));
  __syncwarp();
  float apart = sum > sink ? sink - sum : sum - sink;
  if (threadIdx.x % 32 == 0) *lse = fmaxf(sum, sink) + logf(1.0f + exponential(apart));
}

// d_sinks[h] = minus the sum over the tokens of e^(sinks[h] - lse) times the product of d_out and out of the head. A block has a head. Its
// warp w adds tokens w, w + 32, ..., and the 32 sums are added in order.
KERNEL(1024) attention_sinks_backward(const void* out, const float* lse, const void* d_out, const void* sinks, void* d_sinks, u32 types,
                                      u32 count, u32 seq_len, u32 dim, i64 tokens) {
  __shared__ float shared[32];
  i64 head = blockIdx.x;
  float sink = load1(sinks, type_of(types, 2), head), total = 0.0f;
  for (i64 token = threadIdx.x / 32; token < tokens; token += 32) {
    i64 at = (token * count + head) * dim;
    float product = 0.0f;
    for (int col = threadIdx.x % 32; col < (int)dim; col += 32)
      product = fmaf(load1(out, type_of(types, 0), at + col), load1(d_out, type_of(types, 1), at + col), product);
    float sum = lse[(token / seq_len * count + head) * seq_len + token % seq_len];
    total = fmaf(-exponential(sink - sum), product, total);
  }
  total = block_sum(total, shared);
  if (threadIdx.x == 0) store1(d_sinks, type_of(types, 3), head, total);
}

// out (1, H D): the values of `cache` (n, 2 K D), behind its keys, by the softmax of one query of each head. A block has a
// head. Its 8 warps take positions in turn, each with a running maximum; a lane has every 32nd element of a row. `sinks` (H) may be
// null.
KERNEL(256) cached_attention(const void* q, const void* cache, void* out, const void* sinks, u32 types, i64 positions, i64 head_dim,
                             i64 group, i64 kv_heads, float scale, float cap) {
  __shared__ float tops[8], totals[8], sums[8][256];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 head = blockIdx.x, width = 2 * kv_heads * head_dim, first = head / group * head_dim;
  float query[8], sum[8], top = __uint_as_float(0xff800000u), total = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    int d = lane + 32 * j;
    query[j] = d < head_dim ? scale * load1(q, type_of(types, 0), head * head_dim + d) : 0.0f;
    sum[j] = 0.0f;
  }
  float inner = 1.0f / cap;
  with_type(type_of(types, 1), [&](auto type) {
    for (i64 position = warp; position < positions; position += 8) {
      i64 key = position * width + first, value = key + kv_heads * head_dim;
      float score = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (lane + 32 * j < head_dim) score = fmaf(query[j], get<decltype(type)>(cache, key + lane + 32 * j), score);
      score = warp_combine(score, 32, plus);
      if (cap != 0.0f) score = cap * tanh_of(score * inner);
      float higher = fmaxf(top, score), kept = exponential(top - higher), weight = exponential(score - higher);
      total = fmaf(total, kept, weight);
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (lane + 32 * j < head_dim)
          sum[j] = fmaf(sum[j], kept, weight * get<decltype(type)>(cache, value + lane + 32 * j));
      top = higher;
    }
  });
#pragma unroll
  for (int j = 0; j < 8; j++) sums[warp][lane + 32 * j] = sum[j];
  if (lane == 0) tops[warp] = top, totals[warp] = total;
  __syncthreads();
  for (int d = threadIdx.x; d < head_dim; d += 256) {
    float highest = tops[0];
    for (int w = 1; w < 8; w++) highest = fmaxf(highest, tops[w]);
    float all = 0.0f, result = 0.0f;
    for (int w = 0; w < 8; w++) {
      float factor = exponential(tops[w] - highest);
      all = fmaf(factor, totals[w], all);
      result = fmaf(factor, sums[w][d], result);
    }
    if (sinks) all += exponential(load1(sinks, type_of(types, 3), head) - highest);
    store1(out, type_of(types, 2), head * head_dim + d, result / all);
  }
}

// y (rows, width) = the last columns of x (rows, of), by runs of a row.
KERNEL(256) last_columns(const void* x, void* y, u32 types, i64 rows, i64 of, i64 width) {
  i64 runs = (width + 7) / 8;
  for (i64 unit = (i64)blockIdx.x * blockDim.x + threadIdx.x; unit < rows * runs; unit += (i64)gridDim.x * blockDim.x) {
    i64 row = unit / runs, col = unit % runs * 8;
    int n = run_length(col, width);
    float v[8];
    load8(x, type_of(types, 0), (row + 1) * of - width + col, n, v);
    store8(y, type_of(types, 1), row * width + col, n, v);
  }
}
