// Causal attention on tensor cores: f16 and bf16 on Ampere and later for heads of up to 256, f16 on Volta for heads of up to 128
// (`M`, see tensor_cores.cuh). A block has M::WARPS warps; backward a warp has 16 rows. Everything else is as in attention.cu, but
// weights and gradients of scores are rounded to the storage type before the products. Two programs have the kernels:
// attention_mma.cu those of scores without a cap, attention_mma_capped.cu those of scores with one (M::CAPPED). NVRTC compiles
// both at the same time.
//
// A slab is M::SLAB rows of keys or of queries. Shared memory has two. From Ampere on the next rows come while the products with
// one run; on Volta they are copied before these products.

#include "tensor_cores.cuh"

#define TILE 64
#define LOG2_E 1.44269504088896340736f

// The same for scores with a cap. The slopes of scores take registers, so the kernel by keys keeps less of v.
template <class M>
struct Capped : M {
  static const bool CAPPED = true;
  static const int KEPT_V = 4;
};

// With a cap, replaces products of q and k by their scores' shares of the cap.
template <class M, int N>
INLINE void cap_scores(float (&s)[N][4], const Head& head) {
  if constexpr (M::CAPPED) {
    float inner = inner_of_cap(head);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] = tanh_of(s[n][e] * inner);
  }
}

// What makes the score of a share of the cap; without a cap, of a product of q and k.
template <class M>
INLINE float factor_of_score(const Head& head) { return M::CAPPED ? head.cap : head.scale; }

// The slope of a score by the product of q and k, without head.scale.
template <class M>
INLINE float slope_at(float share) { return M::CAPPED ? slope_of_cap(share) : 1.0f; }

// Operands a of 16 rows of a tile. They stay in registers, since every product takes them.
template <class M, int D, int N>
INLINE void keep_rows(typename M::A (&a)[N], const u16* tile, int row) {
#pragma unroll
  for (int k = 0; k < N; k++) Tile<M, D>::load_a(a[k], tile, row, 16 * k);
}

// Begins to copy a slab of keys, and of values behind it.
template <class M, int D>
INLINE void begin_keys(u16* to, const void* qkv, u32 type, const Head& head, int key) {
  if constexpr (M::COPIES_ASYNC) {
    Tile<M, D>::template begin<M::SLAB>(to, rows_of_qkv(qkv, type, head, key, 1));
    Tile<M, D>::template begin<M::SLAB>(to + M::SLAB * Tile<M, D>::STRIDE, rows_of_qkv(qkv, type, head, key, 2));
  } else {
    Tile<M, D>::template begin_pair<M::SLAB>(to, rows_of_qkv(qkv, type, head, key, 1), rows_of_qkv(qkv, type, head, key, 2));
  }
}

// Forward a warp has M::BLOCKS blocks of 16 queries. The queries are in registers (then the memory of the slabs has their
// tile first), or in a tile of their own.
template <class M, class T, int D>
INLINE void forward(const void* qkv, void* out, float* lse, u32 types, const Head& head) {
  DYNAMIC_SHARED(shared);
  const int BLOCKS = M::BLOCKS, SLAB = M::SLAB, OF_WARP = 16 * BLOCKS, QUERIES = M::WARPS * OF_WARP;
  const int SIZE = SLAB * Tile<M, D>::STRIDE;
  const bool KEEPS = M::KEEPS_FORWARD;
  u16 *q = (u16*)shared, *slabs = KEEPS ? q : q + QUERIES * Tile<M, D>::STRIDE;
  int lane = threadIdx.x % 32, first = threadIdx.x / 32 * OF_WARP, t = head.seq_len;
  int query = QUERIES * (gridDim.x - 1 - blockIdx.x), row = query + first, end = min(query + QUERIES, t);
  int last_start = start_of(head, min(row + OF_WARP, t) - 1);
  float sums[BLOCKS][D / 8][4] = {}, top[2 * BLOCKS], total[2 * BLOCKS];
#pragma unroll
  for (int i = 0; i < 2 * BLOCKS; i++) top[i] = -__int_as_float(0x7f800000), total[i] = 0.0f;
  float scale = factor_of_score<M>(head) * LOG2_E;
  int key = start_of(head, query) / SLAB * SLAB;
  Tile<M, D>::template begin<QUERIES>(q, rows_of_qkv(qkv, type_of(types, 0), head, query, 0));
  typename M::A kept[KEEPS ? BLOCKS : 1][KEEPS ? D / 16 : 1];
  if constexpr (KEEPS) {
    M::wait_copies();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < BLOCKS; m++) keep_rows<M, D>(kept[m], q, first + 16 * m);
    __syncthreads();
  }
  begin_keys<M, D>(slabs, qkv, type_of(types, 0), head, key);
  for (int other = 2 * SIZE; key < end; key += SLAB, other = 2 * SIZE - other) {
    const u16 *k = slabs + (2 * SIZE - other), *v = k + SIZE;
    M::wait_copies();
    // All warps have left the other slabs.
    __syncthreads();
    if (key + SLAB < end) begin_keys<M, D>(slabs + other, qkv, type_of(types, 0), head, key + SLAB);
    // Whether any query of this warp sees any of these keys.
    if (row >= t || key >= row + OF_WARP || key + SLAB <= start_of(head, row)) continue;
    float s[BLOCKS][SLAB / 8][4] = {};
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      typename M::A a[BLOCKS];
      if constexpr (!KEEPS) {
#pragma unroll
        for (int m = 0; m < BLOCKS; m++) Tile<M, D>::load_a(a[m], q, first + 16 * m, d);
      }
#pragma unroll
      for (int n = 0; n < SLAB / 8; n += 2) {
        typename M::B b;
        Tile<M, D>::load_columns(b, k, 8 * n, d);
#pragma unroll
        for (int m = 0; m < BLOCKS; m++) {
          if constexpr (KEEPS) M::template multiply<T, false>(s[m][n], s[m][n + 1], kept[m][d / 16], b);
          else M::template multiply<T, false>(s[m][n], s[m][n + 1], a[m], b);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < BLOCKS; m++) cap_scores<M>(s[m], head);
    // Tiles across the diagonal, and across the start of a document.
    if (key + SLAB > row + 1 || key < last_start) {
#pragma unroll
      for (int i = 0; i < 2 * BLOCKS; i++) {
        int r = row + i / 2 * 16 + M::row() + i % 2 * M::ROW_STEP, of_row = start_of(head, r);
#pragma unroll
        for (int n = 0; n < SLAB / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            int column = key + 8 * n + M::col() + e;
            if (column > r || column < of_row) s[i / 2][n][i % 2 * 2 + e] = -__int_as_float(0x7f800000);
          }
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; i++) {
      float high = top[i];
#pragma unroll
      for (int n = 0; n < SLAB / 8; n++)
#pragma unroll
        for (int e = i % 2 * 2; e < i % 2 * 2 + 2; e++) high = fmaxf(high, s[i / 2][n][e]);
      high = combine_row<M>(high, larger);
      // A row has seen no key yet where its document starts in a later tile.
      float from = -scale * finite_or_zero(high), shrink = exp2_fast(fmaf(top[i], scale, from));
      top[i] = high;
      total[i] *= shrink;
#pragma unroll
      for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = i % 2 * 2; e < i % 2 * 2 + 2; e++) sums[i / 2][n][e] *= shrink;
#pragma unroll
      for (int n = 0; n < SLAB / 8; n++)
#pragma unroll
        for (int e = i % 2 * 2; e < i % 2 * 2 + 2; e++)
          total[i] += s[i / 2][n][e] = exp2_fast(fmaf(s[i / 2][n][e], scale, from));
    }
    if (head.mask.threshold) {
#pragma unroll
      for (int i = 0; i < 2 * BLOCKS; i++)
#pragma unroll
        for (int n = 0; n < SLAB / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            int r = row + i / 2 * 16 + M::row() + i % 2 * M::ROW_STEP;
            u64 index = mask_index(head, r, key + 8 * n + M::col() + e);
            float& w = s[i / 2][n][i % 2 * 2 + e];
            w = masked(head.mask, index, w);
          }
    }
#pragma unroll
    for (int n = 0; n < SLAB / 8; n += 2) {
      typename M::A a[BLOCKS];
#pragma unroll
      for (int m = 0; m < BLOCKS; m++) M::template as_a<T>(a[m], s[m][n], s[m][n + 1]);
#pragma unroll
      for (int c = 0; c < D / 8; c += 2) {
        typename M::B b;
        Tile<M, D>::load_rows(b, v, 8 * n, 8 * c);
#pragma unroll
        for (int m = 0; m < BLOCKS; m++) M::template multiply<T, true>(sums[m][c], sums[m][c + 1], a[m], b);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * BLOCKS; i++) {
    total[i] = combine_row<M>(total[i], plus);
    int r = row + i / 2 * 16 + M::row() + i % 2 * M::ROW_STEP;
    if ((lane & M::ROW_LANES) == 0 && r < t) lse[at_lse(head, r)] = fmaf(top[i], factor_of_score<M>(head), logf(total[i]));
  }
  // The rows of q are this warp's own; those of slabs are not.
  if constexpr (KEEPS) __syncthreads();
#pragma unroll
  for (int m = 0; m < BLOCKS; m++)
    store_rows<M, T, D>(sums[m], 1.0f / total[2 * m], 1.0f / total[2 * m + 1], q, first + 16 * m, out,
                        at_row(head, query), row_width(head), t - query, head.dim);
}

// s and d (16, 16) = x and y times rows `at`.. of x' and y'. Registers have the first operands of y, and y_tile from row
// `first` on has all.
template <class M, class T, int D, int N>
INLINE void two_products(float (&s)[2][4], float (&d)[2][4], const typename M::A (&x)[D / 16],
                         const typename M::A (&y)[N], const u16* y_tile, int first, const u16* x_other,
                         const u16* y_other, int at) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = d[n][e] = 0.0f;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    typename M::B b;
    Tile<M, D>::load_columns(b, x_other, at, 16 * k);
    M::template multiply<T, false>(s[0], s[1], x[k], b);
    Tile<M, D>::load_columns(b, y_other, at, 16 * k);
    if (k < N) {
      M::template multiply<T, false>(d[0], d[1], y[k < N ? k : 0], b);
    } else {
      typename M::A a;
      Tile<M, D>::load_a(a, y_tile, first, 16 * k);
      M::template multiply<T, false>(d[0], d[1], a, b);
    }
  }
}

// A query, a key, and what the gradient of their score needs.
struct Score {
  int query, key, start;
  float lse, delta;
};

// Replaces products of q and k (with a cap, shares of it) by masked weights, and those of d_out and v by gradients of the scores.
// `of` says which score an element is. `all_seen`: every query exists and sees every key.
template <class M, class F>
INLINE void scores_backward(float (&s)[2][4], float (&d)[2][4], const Head& head, bool all_seen, F of) {
  float scale = factor_of_score<M>(head) * LOG2_E, slope[2][4];
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      slope[n][e] = slope_at<M>(s[n][e]);
      s[n][e] = exp2_fast(fmaf(s[n][e], scale, -LOG2_E * of(n, e).lse));
    }
  if (head.mask.threshold) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        Score at = of(n, e);
        float factor = masked(head.mask, mask_index(head, at.query, at.key), 1.0f);
        d[n][e] = s[n][e] * fmaf(d[n][e], factor, -at.delta) * head.scale * slope[n][e];
        s[n][e] *= factor;
      }
  } else {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) d[n][e] = s[n][e] * (d[n][e] - of(n, e).delta) * head.scale * slope[n][e];
  }
  if (all_seen) return;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      Score at = of(n, e);
      bool seen = at.query < (int)head.seq_len && at.key <= at.query && at.key >= at.start;
      s[n][e] = seen ? s[n][e] : 0.0f, d[n][e] = seen ? d[n][e] : 0.0f;
    }
}

// Operands that a head of D columns has, at most `most`.
template <int D>
constexpr int kept(int most) { return most < D / 16 ? most : D / 16; }

// The memory of the slabs first holds the tile of q, until it is in registers. That of d_out is behind it, and stays where
// registers do not keep all of it; else slabs take its memory, too.
template <class M, class T, int D>
INLINE void backward_queries(const Saved& saved, void* d_qkv, const Head& head) {
  DYNAMIC_SHARED(shared);
  const int SLAB = M::SLAB, SIZE = SLAB * Tile<M, D>::STRIDE;
  u16 *slabs = (u16*)shared, *d_out_tile = slabs + TILE * Tile<M, D>::STRIDE;
  int first = threadIdx.x / 32 * 16, t = head.seq_len;
  int query = TILE * (gridDim.x - 1 - blockIdx.x), of_warp = query + first, end = min(query + TILE, t);
  float d_q[D / 8][4] = {}, lse[2], delta[2];
  int start[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int row = of_warp + M::row() + half * M::ROW_STEP;
    start[half] = start_of(head, row);
    lse[half] = row < t ? saved.lse[at_lse(head, row)] : 0.0f;
    delta[half] = row < t ? saved.delta[at_lse(head, row)] : 0.0f;
  }
  int first_start = start_of(head, of_warp), last_start = start_of(head, min(of_warp + 16, t) - 1);
  typename M::A q[D / 16], d_out[kept<D>(M::KEPT_D_OUT)];
  Tile<M, D>::template begin<TILE>(slabs, rows_of_qkv(saved.qkv, 0, head, query, 0));
  Tile<M, D>::template begin<TILE>(d_out_tile, rows_of_out(saved.d_out, 0, head, query));
  M::wait_copies();
  __syncthreads();
  keep_rows<M, D>(q, slabs, first);
  keep_rows<M, D>(d_out, d_out_tile, first);
  __syncthreads();
  int key = start_of(head, query) / SLAB * SLAB;
  begin_keys<M, D>(slabs, saved.qkv, 0, head, key);
  for (int other = 2 * SIZE; key < end; key += SLAB, other = 2 * SIZE - other) {
    const u16 *k = slabs + (2 * SIZE - other), *v = k + SIZE;
    M::wait_copies();
    // All warps have left the other slabs.
    __syncthreads();
    if (key + SLAB < end) begin_keys<M, D>(slabs + other, saved.qkv, 0, head, key + SLAB);
    // No query of this warp sees the keys after its last query.
#pragma unroll 1
    for (int at = 0; at < SLAB && key + at < of_warp + 16 && of_warp < t; at += 16) {
      if (key + at + 15 < first_start) continue;  // nor those before its first document
      float s[2][4], d[2][4];
      two_products<M, T, D>(s, d, q, d_out, d_out_tile, first, k, v, at);
      bool all_seen = key + at + 15 <= of_warp && key + at >= last_start && of_warp + 16 <= t;
      cap_scores<M>(s, head);
      scores_backward<M>(s, d, head, all_seen, [&](int n, int e) {
        int half = e / 2;
        return Score{of_warp + M::row() + half * M::ROW_STEP, key + at + 8 * n + M::col() + e % 2, start[half], lse[half],
                     delta[half]};
      });
      typename M::A a;
      M::template as_a<T>(a, d[0], d[1]);
      multiply_rows<M, T, D>(d_q, a, k, at);
    }
  }
  __syncthreads();
  store_rows<M, T, D>(d_q, 1, 1, slabs, first, d_qkv, at_qkv(head, query, 0), qkv_width(head), t - query, head.dim);
}

// Backward for heads of up to 256 a pair of warps has 16 rows of a tile of 64, since one warp has no registers for what they need.
// The first keeps q or k in registers and computes scores, the second d_out or v and gradients of weights. By queries each hands
// its block of products over to the other, and has half of the columns of d_q. By keys the first hands over weights; it has d_v,
// the second d_k. So a block of scores takes 3 products and 4. Without pairs d_k and d_v would need a kernel each, 5 products, or
// a kernel for each half of their columns, 6.
template <class M>
struct Pairs {
  // By warp, what it hands over: a block of products.
  typedef float4 Products[M::WARPS][2][32];
  static INLINE int pair() { return threadIdx.x / 32 % (M::WARPS / 2); }
  // Warps of a pair are far apart: each scheduler of a multiprocessor then has both kinds.
  static INLINE bool is_second() { return threadIdx.x / 32 >= M::WARPS / 2; }
  static INLINE void give(Products& to, int warp, const float (&x)[2][4]) {
#pragma unroll
    for (int n = 0; n < 2; n++)
      to[warp][n][threadIdx.x % 32] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
  }
  // What a warp gave as x[n].
  static INLINE void take(float (&x)[4], const Products& from, int warp, int n) {
    float4 four = from[warp][n][threadIdx.x % 32];
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  }
};

// x (16, 16) = rows in registers times the first 16 rows of a slab.
template <class M, class T, int D>
INLINE void product(float (&x)[2][4], const typename M::A (&rows)[D / 16], const u16* slab) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) x[n][e] = 0.0f;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    typename M::B b;
    Tile<M, D>::load_columns(b, slab, 0, 16 * k);
    M::template multiply<T, false>(x[0], x[1], rows[k], b);
  }
}

// Slabs take the memory of both tiles, once these are in registers. Behind it is what warps hand over.
template <class M, class T, int D>
INLINE void backward_queries_by_pairs(const Saved& saved, void* d_qkv, const Head& head) {
  DYNAMIC_SHARED(shared);
  const int SLAB = M::SLAB, SIZE = SLAB * Tile<M, D>::STRIDE, TILE_SIZE = TILE * Tile<M, D>::STRIDE;
  static_assert(SLAB == 16 && 8 * M::WARPS == TILE, "a block of scores by slab and pair");
  u16* slabs = (u16*)shared;
  typename Pairs<M>::Products& products = *(typename Pairs<M>::Products*)(slabs + 2 * TILE_SIZE);
  int first = 16 * Pairs<M>::pair(), t = head.seq_len;
  bool second = Pairs<M>::is_second();
  int query = TILE * (gridDim.x - 1 - blockIdx.x), of_pair = query + first, end = min(query + TILE, t);
  float d_q[D / 16][4] = {}, lse[2], delta[2];
  int start[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int row = of_pair + M::row() + half * M::ROW_STEP;
    start[half] = start_of(head, row);
    lse[half] = row < t ? saved.lse[at_lse(head, row)] : 0.0f;
    delta[half] = row < t ? saved.delta[at_lse(head, row)] : 0.0f;
  }
  int first_start = start_of(head, of_pair), last_start = start_of(head, min(of_pair + 16, t) - 1);
  typename M::A rows[D / 16];
  Tile<M, D>::template begin<TILE>(slabs, rows_of_qkv(saved.qkv, 0, head, query, 0));
  Tile<M, D>::template begin<TILE>(slabs + TILE_SIZE, rows_of_out(saved.d_out, 0, head, query));
  M::wait_copies();
  __syncthreads();
  keep_rows<M, D>(rows, second ? slabs + TILE_SIZE : slabs, first);
  __syncthreads();
  int key = start_of(head, query) / SLAB * SLAB;
  begin_keys<M, D>(slabs, saved.qkv, 0, head, key);
  for (int other = 2 * SIZE; key < end; key += SLAB, other = 2 * SIZE - other) {
    const u16 *k = slabs + (2 * SIZE - other), *v = k + SIZE;
    M::wait_copies();
    // All warps have left the other slabs, and what was handed over.
    __syncthreads();
    if (key + SLAB < end) begin_keys<M, D>(slabs + other, saved.qkv, 0, head, key + SLAB);
    // No query of this pair sees the keys after its last query, nor those before its first document.
    bool sees = of_pair < t && key < of_pair + 16 && key + 15 >= first_start;
    float x[2][4];
    if (sees) {
      product<M, T, D>(x, rows, second ? v : k);
      // Both warps need the shares of the cap; the first alone computes them.
      if (M::CAPPED && !second) cap_scores<M>(x, head);
      Pairs<M>::give(products, threadIdx.x / 32, x);
    }
    __syncthreads();
    if (!sees) continue;
    // Both warps read both blocks: a choice of registers by warp would cost more.
    float s[2][4], d[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      Pairs<M>::take(s[n], products, Pairs<M>::pair(), n);
      Pairs<M>::take(d[n], products, Pairs<M>::pair() + M::WARPS / 2, n);
    }
    bool all_seen = key + 15 <= of_pair && key >= last_start && of_pair + 16 <= t;
    scores_backward<M>(s, d, head, all_seen, [&](int n, int e) {
      int half = e / 2;
      return Score{of_pair + M::row() + half * M::ROW_STEP, key + 8 * n + M::col() + e % 2, start[half], lse[half], delta[half]};
    });
    typename M::A a;
    M::template as_a<T>(a, d[0], d[1]);
    multiply_rows<M, T, D>(d_q, a, second ? k + D / 2 : k, 0);
  }
  __syncthreads();
  int column = second ? D / 2 : 0;
  store_rows<M, T, D / 2>(d_q, 1, 1, second ? slabs + TILE_SIZE : slabs, first, d_qkv, at_qkv(head, query, 0) + column,
                          qkv_width(head), t - query, (int)head.dim - column);
}

// What a slab of queries has of each row.
template <int SLAB>
struct OfRows {
  float lse[SLAB], delta[SLAB];
  int start[SLAB];
};

// Begins to copy q, d_out and the numbers of a slab of queries.
template <class M, int D, int SLAB>
INLINE void begin_queries(u16* q, OfRows<SLAB>& rows, const Saved& saved, const Head& head, int query) {
  if constexpr (M::COPIES_ASYNC) {
    Tile<M, D>::template begin<SLAB>(q, rows_of_qkv(saved.qkv, 0, head, query, 0));
    Tile<M, D>::template begin<SLAB>(q + SLAB * Tile<M, D>::STRIDE, rows_of_out(saved.d_out, 0, head, query));
  } else {
    Tile<M, D>::template begin_pair<SLAB>(q, rows_of_qkv(saved.qkv, 0, head, query, 0),
                                          rows_of_out(saved.d_out, 0, head, query));
  }
  int i = threadIdx.x % SLAB, part = threadIdx.x / SLAB, token = query + i;
  bool exists = token < (int)head.seq_len;
  if (part == 0) M::begin_copy_word(&rows.lse[i], &saved.lse[at_lse(head, token)], exists);
  if (part == 1) M::begin_copy_word(&rows.delta[i], &saved.delta[at_lse(head, token)], exists);
  if (part == 2) {
    if (head.starts && head.window >= head.seq_len) {
      M::begin_copy_word(&rows.start[i], &head.starts[blockIdx.z * head.seq_len + (u32)token], exists);
    } else {
      rows.start[i] = start_of(head, token);
    }
  }
}

// The memory of the slabs first holds the tile of keys, until it is in registers. There is room for a part of the values beside
// them; the rest stays in its tile.
template <class M, class T, int D>
INLINE void backward_keys(const Saved& saved, void* d_qkv, Head head) {
  DYNAMIC_SHARED(shared);
  const int SLAB = M::SLAB, SIZE = SLAB * Tile<M, D>::STRIDE, TILE_SIZE = TILE * Tile<M, D>::STRIDE;
  u16 *slabs = (u16*)shared, *v_tile = slabs + 4 * SIZE;
  OfRows<SLAB>* of_rows = (OfRows<SLAB>*)(v_tile + TILE_SIZE);
  int first = threadIdx.x / 32 * 16, t = head.seq_len;
  int key = TILE * blockIdx.x, of_warp = key + first;
  float d_k[D / 8][4] = {}, d_v[D / 8][4] = {};
  u32 last = (blockIdx.y + 1) * group_size(head);
  head.shared = blockIdx.y, head.number = blockIdx.y * group_size(head);
  typename M::A k[D / 16], v[kept<D>(M::KEPT_V)];
  Tile<M, D>::template begin<TILE>(slabs, rows_of_qkv(saved.qkv, 0, head, key, 1));
  Tile<M, D>::template begin<TILE>(v_tile, rows_of_qkv(saved.qkv, 0, head, key, 2));
  M::wait_copies();
  __syncthreads();
  keep_rows<M, D>(k, slabs, first);
  keep_rows<M, D>(v, v_tile, first);
  __syncthreads();
  int query = key;
  begin_queries<M, D>(slabs, of_rows[0], saved, head, query);
  for (int other = 1; head.number < last; other = 1 - other) {
    const u16 *q = slabs + (1 - other) * 2 * SIZE, *d_out = q + SIZE;
    const OfRows<SLAB>& rows = of_rows[1 - other];
    Head ahead = head;
    int next = query + SLAB;
    // Documents that start behind the keys see none of them, nor do those after.
    if (next >= t || start_of(head, next) >= key + TILE) next = key, ahead.number++;
    M::wait_copies();
    // All warps have left the other slabs.
    __syncthreads();
    if (ahead.number < last) begin_queries<M, D>(slabs + other * 2 * SIZE, of_rows[other], saved, ahead, next);
#pragma unroll 1
    for (int at = 0; at < SLAB && query + at < t; at += 16) {
      // Queries before this warp's first key see none of its keys, nor do those of later documents.
      if (query + at + 15 < of_warp || rows.start[at] > of_warp + 15) continue;
      // s and d are transposed: rows are keys.
      float s[2][4], d[2][4];
      two_products<M, T, D>(s, d, k, v, v_tile, first, q, d_out, at);
      bool all_seen = query + at >= of_warp + 15 && query + at + 16 <= t && rows.start[at + 15] <= of_warp;
      cap_scores<M>(s, head);
      scores_backward<M>(s, d, head, all_seen, [&](int n, int e) {
        int col = at + 8 * n + M::col() + e % 2;
        return Score{query + col, of_warp + M::row() + e / 2 * M::ROW_STEP, rows.start[col], rows.lse[col], rows.delta[col]};
      });
      typename M::A a;
      M::template as_a<T>(a, s[0], s[1]);
      multiply_rows<M, T, D>(d_v, a, d_out, at);
      M::template as_a<T>(a, d[0], d[1]);
      multiply_rows<M, T, D>(d_k, a, q, at);
    }
    query = next, head.number = ahead.number;
  }
  i64 stride = qkv_width(head);
  __syncthreads();
  store_rows<M, T, D>(d_k, 1, 1, slabs, first, d_qkv, at_qkv(head, key, 1), stride, t - key, head.dim);
  store_rows<M, T, D>(d_v, 1, 1, v_tile, first, d_qkv, at_qkv(head, key, 2), stride, t - key, head.dim);
}

// By keys, as backward_queries_by_pairs.
template <class M, class T, int D>
INLINE void backward_keys_by_pairs(const Saved& saved, void* d_qkv, Head head) {
  DYNAMIC_SHARED(shared);
  const int SLAB = M::SLAB, SIZE = SLAB * Tile<M, D>::STRIDE, TILE_SIZE = TILE * Tile<M, D>::STRIDE;
  static_assert(SLAB == 16 && 8 * M::WARPS == TILE, "a block of scores by slab and pair");
  u16* slabs = (u16*)shared;
  typename Pairs<M>::Products* products = (typename Pairs<M>::Products*)(slabs + 2 * TILE_SIZE);
  OfRows<SLAB>* of_rows = (OfRows<SLAB>*)(products + 1);
  int first = 16 * Pairs<M>::pair(), t = head.seq_len, key = TILE * blockIdx.x, of_pair = key + first;
  bool second = Pairs<M>::is_second();
  // Of d_v, or of d_k for the second warp.
  float sums[D / 8][4] = {};
  u32 last = (blockIdx.y + 1) * group_size(head);
  head.shared = blockIdx.y, head.number = blockIdx.y * group_size(head);
  typename M::A kept[D / 16];
  Tile<M, D>::template begin<TILE>(slabs, rows_of_qkv(saved.qkv, 0, head, key, 1));
  Tile<M, D>::template begin<TILE>(slabs + TILE_SIZE, rows_of_qkv(saved.qkv, 0, head, key, 2));
  M::wait_copies();
  __syncthreads();
  keep_rows<M, D>(kept, second ? slabs + TILE_SIZE : slabs, first);
  __syncthreads();
  int query = key;
  begin_queries<M, D>(slabs, of_rows[0], saved, head, query);
  for (int other = 1; head.number < last; other = 1 - other) {
    const u16 *q = slabs + (1 - other) * 2 * SIZE, *d_out = q + SIZE;
    const OfRows<SLAB>& rows = of_rows[1 - other];
    Head ahead = head;
    int now = query, next = query + SLAB;
    // Documents and windows that start behind the keys see none of them, nor do those after.
    if (next >= t || start_of(head, next) >= key + TILE) next = key, ahead.number++;
    M::wait_copies();
    // All warps have left the other slabs, and what was handed over.
    __syncthreads();
    if (ahead.number < last) begin_queries<M, D>(slabs + other * 2 * SIZE, of_rows[other], saved, ahead, next);
    // Queries before this pair's first key see none of its keys, nor do those of later documents.
    bool sees = now + 15 >= of_pair && rows.start[0] <= of_pair + 15;
    // Products are transposed: rows are keys.
    float x[2][4];
    if (sees) product<M, T, D>(x, kept, second ? d_out : q);
    if (sees && !second) {
      float scale = factor_of_score<M>(head) * LOG2_E, sloped[2][4];
      cap_scores<M>(x, head);
      bool all_seen = now >= of_pair + 15 && now + 16 <= t && rows.start[15] <= of_pair;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int col = 8 * n + M::col() + e % 2, row = of_pair + M::row() + e / 2 * M::ROW_STEP;
          bool seen = all_seen || (now + col < t && row <= now + col && row >= rows.start[col]);
          float slope = slope_at<M>(x[n][e]);
          x[n][e] = seen ? exp2_fast(fmaf(x[n][e], scale, -LOG2_E * rows.lse[col])) : 0.0f;
          sloped[n][e] = seen ? x[n][e] * slope : 0.0f;
        }
      Pairs<M>::give(*products, threadIdx.x / 32, x);
      // The second warp needs weights for gradients of scores alone: with a cap it gets weights times slopes.
      if constexpr (M::CAPPED) Pairs<M>::give(*products, threadIdx.x / 32 + M::WARPS / 2, sloped);
    }
    __syncthreads();
    if (sees) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float w[4];
        Pairs<M>::take(w, *products, M::CAPPED ? (int)threadIdx.x / 32 : Pairs<M>::pair(), n);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int col = 8 * n + M::col() + e % 2, row = of_pair + M::row() + e / 2 * M::ROW_STEP;
          float factor = 1.0f;
          if (head.mask.threshold) factor = masked(head.mask, mask_index(head, now + col, row), 1.0f);
          // A key with weight 0 may be unseen: then its products need not be finite.
          float d = w[e] == 0.0f ? 0.0f : w[e] * fmaf(x[n][e], factor, -rows.delta[col]) * head.scale;
          x[n][e] = second ? d : w[e] * factor;
        }
      }
      typename M::A a;
      M::template as_a<T>(a, x[0], x[1]);
      multiply_rows<M, T, D>(sums, a, second ? q : d_out, 0);
    }
    query = next, head.number = ahead.number;
  }
  __syncthreads();
  store_rows<M, T, D>(sums, 1, 1, second ? slabs + TILE_SIZE : slabs, first, d_qkv, at_qkv(head, key, second ? 1 : 2),
                      qkv_width(head), t - key, head.dim);
}

// What kernels call. All tensors have the type of qkv.
template <class M, int D>
INLINE void forward_of(const void* qkv, void* out, float* lse, u32 types, const Head& head) {
  with_half<M>(type_of(types, 0), [&](auto type) { forward<M, decltype(type), D>(qkv, out, lse, types, head); });
}
template <class M, int D>
INLINE void queries_of(const Saved& saved, void* d_qkv, const Head& head) {
  with_half<M>(type_of(saved.types, 0), [&](auto type) {
    if constexpr (D > 128) backward_queries_by_pairs<M, decltype(type), D>(saved, d_qkv, head);
    else backward_queries<M, decltype(type), D>(saved, d_qkv, head);
  });
}
template <class M, int D>
INLINE void keys_of(const Saved& saved, void* d_qkv, const Head& head) {
  with_half<M>(type_of(saved.types, 0), [&](auto type) {
    if constexpr (D > 128) backward_keys_by_pairs<M, decltype(type), D>(saved, d_qkv, head);
    else backward_keys<M, decltype(type), D>(saved, d_qkv, head);
  });
}
