// Causal attention on tensor cores (sm_80 and later) for f16 and bf16, heads of up to 128: m16n8k16
// products with fp32 sums. A block has 4 warps; backward a warp has 16 rows of a tile of 64.
// Everything else is as in attention.cu, but weights and gradients of scores are rounded to the
// storage type before the products.
//
// In a 16 x 8 block of sums, a lane has rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and
// the next: sums[0..2] and sums[2..4].

#define TILE 64
// Rows of a slab. Shared memory has two: while the products with one run, the next rows come.
#define SLAB 32
#define LOG2_E 1.44269504088896340736f

#ifdef ONEBOX_EMULATED
INLINE float exp2_fast(float x) { return exp2f(x); }
INLINE void load_matrices(u32 (&x)[4], const u16* row) { emulator::ldmatrix(x, row, false); }
INLINE void load_transposed(u32 (&x)[4], const u16* row) { emulator::ldmatrix(x, row, true); }
template <class T>
INLINE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::mma_16816(d, a, b0, b1, T::widen);
}
INLINE void begin_copy(u16* to, const u16* from, bool exists) {
  *(uint4*)to = exists ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
}
INLINE void begin_copy_word(void* to, const void* from, bool exists) { *(u32*)to = exists ? *(const u32*)from : 0; }
INLINE void wait_copies() {}
INLINE int min(int a, int b) { return a < b ? a : b; }
#else
// Begins to copy 16 bytes to shared memory (0 where they do not exist). They are there after wait_copies, and for other
// threads after a barrier behind it.
INLINE void begin_copy(u16* to, const u16* from, bool exists) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
#endif
}
// The same of 4 bytes.
INLINE void begin_copy_word(void* to, const void* from, bool exists) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
               "r"(exists ? 4 : 0)
               : "memory");
#endif
}
INLINE void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
INLINE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Loads four 8 x 8 matrices. Lane l gives the row l % 8 of matrix l / 8, and gets row l / 4,
// columns 2 (l % 4) and the next.
INLINE void load_matrices(u32 (&x)[4], const u16* row) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"((u32)__cvta_generic_to_shared(row)));
#endif
}
// Loads four transposed 8 x 8 matrices.
INLINE void load_transposed(u32 (&x)[4], const u16* row) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"((u32)__cvta_generic_to_shared(row)));
#endif
}
#define MMA(type)                                                                                                   \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                               \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                               \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <class T>
INLINE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <>
INLINE void multiply<OfF16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  MMA("f16");
#endif
}
template <>
INLINE void multiply<OfBf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  MMA("bf16");
#endif
}
#endif

// Calls f with the type, F16 or BF16. Older GPUs never launch these kernels, and there they are
// empty.
template <class F>
INLINE void with_half(u32 type, F f) {
#if defined(ONEBOX_EMULATED) || __CUDA_ARCH__ >= 800
  if (type == F16) f(OfF16());
  else f(OfBf16());
#endif
}

// Tiles in shared memory: rows of D elements and 8 more, so that 8 rows are in different banks.
template <int D>
struct Tile {
  static const int STRIDE = D + 8, SIZE = TILE * STRIDE;

  // Begins to load the first ROWS rows, 0 outside; wait_copies and a barrier follow.
  template <int ROWS>
  static INLINE void begin(u16* to, const Rows& rows) {
    const u16* from = (const u16*)rows.x + rows.start;
    if (!aligned(from) || (rows.stride | rows.width) % 8) {
#pragma unroll 1
      for (int i = threadIdx.x; i < ROWS * D; i += 128) {
        int row = i / D, col = i % D;
        to[row * STRIDE + col] = row < rows.rows && col < rows.width ? from[row * rows.stride + col] : (u16)0;
      }
      return;
    }
    int row = threadIdx.x / (D / 8), col = threadIdx.x % (D / 8) * 8;
    const int STEP = 128 / (D / 8);
    to += row * STRIDE + col, from += row * rows.stride + col;
    int count = col < rows.width ? rows.rows - row : 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, to += STEP * STRIDE, from += STEP * rows.stride)
      begin_copy(to, from, i < count);
  }

  // Operand a (16, 16): rows `row`.. and columns `col`.. of the tile.
  static INLINE void rows_16(u32 (&a)[4], const u16* tile, int row, int col) {
    u32 lane = threadIdx.x % 32;
    load_matrices(a, tile + (row + lane % 16) * STRIDE + col + lane / 16 * 8);
  }
  // Loads operands b (16, 8) of two products, b[k][n] = tile[row + n][col + k]: b[0..2] for n < 8,
  // and b[2..4].
  static INLINE void columns_16(u32 (&b)[4], const u16* tile, int row, int col) {
    u32 lane = threadIdx.x % 32;
    load_matrices(b, tile + (row + lane / 16 * 8 + lane % 8) * STRIDE + col + lane / 8 % 2 * 8);
  }
  // Loads operands b with b[k][n] = tile[row + k][col + n].
  static INLINE void rows_as_b(u32 (&b)[4], const u16* tile, int row, int col) {
    u32 lane = threadIdx.x % 32;
    load_transposed(b, tile + (row + lane % 16) * STRIDE + col + lane / 16 * 8);
  }
};

template <class T>
INLINE u32 pack(float low, float high) {
  return (u32)T::round(low) | (u32)T::round(high) << 16;
}
// Converts two neighbouring blocks of sums to an operand a.
template <class T>
INLINE void as_rows(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack<T>(left[0], left[1]), a[1] = pack<T>(left[2], left[3]);
  a[2] = pack<T>(right[0], right[1]), a[3] = pack<T>(right[2], right[3]);
}

// sums (16, D) += a (16, 16) times rows `row`.. of the tile.
template <class T, int D>
INLINE void multiply_rows(float (&sums)[D / 8][4], const u32 (&a)[4], const u16* tile, int row) {
#pragma unroll
  for (int n = 0; n < D / 8; n += 2) {
    u32 b[4];
    Tile<D>::rows_as_b(b, tile, row, 8 * n);
    multiply<T>(sums[n], a, b[0], b[1]);
    multiply<T>(sums[n + 1], a, b[2], b[3]);
  }
}

// y = this warp's 16 rows of sums from row `first` on, each times its factor, for existing rows. They go through the same
// rows of a tile, which no other warp may use any more.
template <class T, int D>
INLINE void store_rows(const float (&sums)[D / 8][4], float factor_0, float factor_1, u16* tile, int first, void* y,
                       i64 start, i64 stride, int rows, int width) {
  int lane = threadIdx.x % 32;
  u16* row = tile + (first + lane / 4) * Tile<D>::STRIDE + lane % 4 * 2;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < D / 8; n++) {
    *(u32*)(row + 8 * n) = pack<T>(sums[n][0] * factor_0, sums[n][1] * factor_0);
    *(u32*)(row + 8 * Tile<D>::STRIDE + 8 * n) = pack<T>(sums[n][2] * factor_1, sums[n][3] * factor_1);
  }
  __syncwarp();
  int col = lane % (D / 8) * 8;
#pragma unroll 1
  for (int r = first + lane / (D / 8); r < first + 16 && r < rows; r += 32 / (D / 8)) {
    const u16* from = tile + r * Tile<D>::STRIDE + col;
    u16* to = (u16*)y + start + r * stride + col;
    if (col + 8 <= width && aligned(to)) *(uint4*)to = *(const uint4*)from;
    else
      for (int j = 0; j < 8 && col + j < width; j++) to[j] = from[j];
  }
}

// Forward a block has 128 queries and a warp 32: an operand b, once loaded, serves two products.
#define QUERIES 128
#define OF_WARP 32

template <class T, int D>
INLINE void forward(const void* qkv, void* out, float* lse, u32 types, const Head& head) {
  DYNAMIC_SHARED(shared);
  const int SIZE = SLAB * Tile<D>::STRIDE;
  u16 *q = (u16*)shared, *slabs = q + QUERIES * Tile<D>::STRIDE;
  int lane = threadIdx.x % 32, first = threadIdx.x / 32 * OF_WARP, t = head.seq_len;
  int query = QUERIES * (gridDim.x - 1 - blockIdx.x), row = query + first, end = min(query + QUERIES, t);
  int last_start = start_of(head, min(row + OF_WARP, t) - 1);
  float sums[2][D / 8][4] = {}, top[4], total[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 4; i++) top[i] = -__int_as_float(0x7f800000);
  float scale = head.scale * LOG2_E;
  int key = start_of(head, query) / SLAB * SLAB;
  Tile<D>::template begin<QUERIES>(q, rows_of_qkv(qkv, type_of(types, 0), head, query, 0));
  Tile<D>::template begin<SLAB>(slabs, rows_of_qkv(qkv, type_of(types, 0), head, key, 1));
  Tile<D>::template begin<SLAB>(slabs + SIZE, rows_of_qkv(qkv, type_of(types, 0), head, key, 2));
  for (int other = 2 * SIZE; key < end; key += SLAB, other = 2 * SIZE - other) {
    const u16 *k = slabs + (2 * SIZE - other), *v = k + SIZE;
    wait_copies();
    // All warps have left the other slabs.
    __syncthreads();
    if (key + SLAB < end) {
      Tile<D>::template begin<SLAB>(slabs + other, rows_of_qkv(qkv, type_of(types, 0), head, key + SLAB, 1));
      Tile<D>::template begin<SLAB>(slabs + other + SIZE, rows_of_qkv(qkv, type_of(types, 0), head, key + SLAB, 2));
    }
    // Whether any query of this warp sees any of these keys.
    if (row >= t || key >= row + OF_WARP || key + SLAB <= start_of(head, row)) continue;
    float s[2][SLAB / 8][4] = {};
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      u32 a[2][4];
      Tile<D>::rows_16(a[0], q, first, d);
      Tile<D>::rows_16(a[1], q, first + 16, d);
#pragma unroll
      for (int n = 0; n < SLAB / 8; n += 2) {
        u32 b[4];
        Tile<D>::columns_16(b, k, 8 * n, d);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          multiply<T>(s[m][n], a[m], b[0], b[1]);
          multiply<T>(s[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
    // Tiles across the diagonal, and across the start of a document.
    if (key + SLAB > row + 1 || key < last_start) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int r = row + lane / 4 + 8 * i, of_row = start_of(head, r);
#pragma unroll
        for (int n = 0; n < SLAB / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            int column = key + 8 * n + lane % 4 * 2 + e;
            if (column > r || column < of_row) s[i / 2][n][i % 2 * 2 + e] = -__int_as_float(0x7f800000);
          }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float high = top[i];
#pragma unroll
      for (int n = 0; n < SLAB / 8; n++)
#pragma unroll
        for (int e = i % 2 * 2; e < i % 2 * 2 + 2; e++) high = fmaxf(high, s[i / 2][n][e]);
      high = warp_combine(high, 4, larger);
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
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int n = 0; n < SLAB / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            u64 index = mask_index(head, row + lane / 4 + 8 * i, key + 8 * n + lane % 4 * 2 + e);
            float& w = s[i / 2][n][i % 2 * 2 + e];
            w = masked(head.mask, index, w);
          }
    }
#pragma unroll
    for (int n = 0; n < SLAB / 8; n += 2) {
      u32 a[2][4];
#pragma unroll
      for (int m = 0; m < 2; m++) as_rows<T>(a[m], s[m][n], s[m][n + 1]);
#pragma unroll
      for (int c = 0; c < D / 8; c += 2) {
        u32 b[4];
        Tile<D>::rows_as_b(b, v, 8 * n, 8 * c);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          multiply<T>(sums[m][c], a[m], b[0], b[1]);
          multiply<T>(sums[m][c + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    total[i] = warp_combine(total[i], 4, plus);
    int r = row + lane / 4 + 8 * i;
    if (lane % 4 == 0 && r < t) lse[at_lse(head, r)] = fmaf(top[i], head.scale, logf(total[i]));
  }
#pragma unroll
  for (int m = 0; m < 2; m++)
    store_rows<T, D>(sums[m], 1.0f / total[2 * m], 1.0f / total[2 * m + 1], q, first + 16 * m, out, at_row(head, query),
                     row_width(head), t - query, head.dim);
}

// Operands a of 16 rows of a tile. They stay in registers, since every product takes them.
template <int D, int N>
INLINE void keep_rows(u32 (&a)[N][4], const u16* tile, int row) {
#pragma unroll
  for (int k = 0; k < N; k++) Tile<D>::rows_16(a[k], tile, row, 16 * k);
}

// s and d (16, 16) = x and y times rows `at`.. of x' and y'. Registers have the first operands of y, and y_tile from row
// `first` on has all.
template <class T, int D, int N>
INLINE void two_products(float (&s)[2][4], float (&d)[2][4], const u32 (&x)[D / 16][4], const u32 (&y)[N][4],
                         const u16* y_tile, int first, const u16* x_other, const u16* y_other, int at) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = d[n][e] = 0.0f;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    u32 a[4], b[4];
    Tile<D>::columns_16(b, x_other, at, 16 * k);
    multiply<T>(s[0], x[k], b[0], b[1]);
    multiply<T>(s[1], x[k], b[2], b[3]);
    if (k >= N) Tile<D>::rows_16(a, y_tile, first, 16 * k);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = k < N ? y[k < N ? k : 0][i] : a[i];
    Tile<D>::columns_16(b, y_other, at, 16 * k);
    multiply<T>(d[0], a, b[0], b[1]);
    multiply<T>(d[1], a, b[2], b[3]);
  }
}

// A query, a key, and what the gradient of their score needs.
struct Score {
  int query, key, start;
  float lse, delta;
};

// Replaces products of q and k by masked weights, and those of d_out and v by gradients of the scores. `of` says which
// score an element is. `all_seen`: every query exists and sees every key.
template <class F>
INLINE void scores_backward(float (&s)[2][4], float (&d)[2][4], const Head& head, bool all_seen, F of) {
  float scale = head.scale * LOG2_E;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = exp2_fast(fmaf(s[n][e], scale, -LOG2_E * of(n, e).lse));
  if (head.mask.threshold) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        Score at = of(n, e);
        float factor = masked(head.mask, mask_index(head, at.query, at.key), 1.0f);
        d[n][e] = s[n][e] * fmaf(d[n][e], factor, -at.delta) * head.scale;
        s[n][e] *= factor;
      }
  } else {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) d[n][e] = s[n][e] * (d[n][e] - of(n, e).delta) * head.scale;
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

// The memory of two slabs of keys and of values first holds the tiles of q and d_out, until they are in registers.
template <class T, int D>
INLINE void backward_queries(const Saved& saved, void* d_qkv, const Head& head) {
  DYNAMIC_SHARED(shared);
  const int SIZE = SLAB * Tile<D>::STRIDE;
  u16* slabs = (u16*)shared;
  int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16, t = head.seq_len;
  int query = TILE * (gridDim.x - 1 - blockIdx.x), of_warp = query + first, end = min(query + TILE, t);
  float d_q[D / 8][4] = {}, lse[2], delta[2];
  int start[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int row = of_warp + lane / 4 + 8 * half;
    start[half] = start_of(head, row);
    lse[half] = row < t ? saved.lse[at_lse(head, row)] : 0.0f;
    delta[half] = row < t ? saved.delta[at_lse(head, row)] : 0.0f;
  }
  int first_start = start_of(head, of_warp), last_start = start_of(head, min(of_warp + 16, t) - 1);
  u32 q[D / 16][4], d_out[D / 16][4];
  Tile<D>::template begin<TILE>(slabs, rows_of_qkv(saved.qkv, 0, head, query, 0));
  Tile<D>::template begin<TILE>(slabs + 2 * SIZE, rows_of_out(saved.d_out, 0, head, query));
  wait_copies();
  __syncthreads();
  keep_rows<D>(q, slabs, first);
  keep_rows<D>(d_out, slabs + 2 * SIZE, first);
  __syncthreads();
  int key = start_of(head, query) / SLAB * SLAB;
  Tile<D>::template begin<SLAB>(slabs, rows_of_qkv(saved.qkv, 0, head, key, 1));
  Tile<D>::template begin<SLAB>(slabs + SIZE, rows_of_qkv(saved.qkv, 0, head, key, 2));
  for (int other = 2 * SIZE; key < end; key += SLAB, other = 2 * SIZE - other) {
    const u16 *k = slabs + (2 * SIZE - other), *v = k + SIZE;
    wait_copies();
    // All warps have left the other slabs.
    __syncthreads();
    if (key + SLAB < end) {
      Tile<D>::template begin<SLAB>(slabs + other, rows_of_qkv(saved.qkv, 0, head, key + SLAB, 1));
      Tile<D>::template begin<SLAB>(slabs + other + SIZE, rows_of_qkv(saved.qkv, 0, head, key + SLAB, 2));
    }
    // No query of this warp sees the keys after its last query.
#pragma unroll 1
    for (int at = 0; at < SLAB && key + at < of_warp + 16 && of_warp < t; at += 16) {
      if (key + at + 15 < first_start) continue;  // nor those before its first document
      float s[2][4], d[2][4];
      two_products<T, D>(s, d, q, d_out, slabs, 0, k, v, at);
      bool all_seen = key + at + 15 <= of_warp && key + at >= last_start && of_warp + 16 <= t;
      scores_backward(s, d, head, all_seen, [&](int n, int e) {
        int half = e / 2;
        return Score{of_warp + lane / 4 + 8 * half, key + at + 8 * n + lane % 4 * 2 + e % 2, start[half], lse[half],
                     delta[half]};
      });
      u32 a[4];
      as_rows<T>(a, d[0], d[1]);
      multiply_rows<T, D>(d_q, a, k, at);
    }
  }
  __syncthreads();
  store_rows<T, D>(d_q, 1, 1, slabs, first, d_qkv, at_qkv(head, query, 0), qkv_width(head), t - query, head.dim);
}

// What a slab of queries has of each row.
struct OfRows {
  float lse[SLAB], delta[SLAB];
  int start[SLAB];
};

// Begins to copy q, d_out and the numbers of a slab of queries.
template <int D>
INLINE void begin_queries(u16* q, OfRows& rows, const Saved& saved, const Head& head, int query) {
  Tile<D>::template begin<SLAB>(q, rows_of_qkv(saved.qkv, 0, head, query, 0));
  Tile<D>::template begin<SLAB>(q + SLAB * Tile<D>::STRIDE, rows_of_out(saved.d_out, 0, head, query));
  int i = threadIdx.x % SLAB, part = threadIdx.x / SLAB, token = query + i;
  bool exists = token < (int)head.seq_len;
  if (part == 0) begin_copy_word(&rows.lse[i], &saved.lse[at_lse(head, token)], exists);
  if (part == 1) begin_copy_word(&rows.delta[i], &saved.delta[at_lse(head, token)], exists);
  if (part == 2) {
    if (head.starts) begin_copy_word(&rows.start[i], &head.starts[blockIdx.z * head.seq_len + (u32)token], exists);
    else rows.start[i] = 0;
  }
}

// The memory of two slabs of queries first holds the tile of keys, until it is in registers. There is room for a part of the
// values beside them; the rest stays in its tile.
template <class T, int D>
INLINE void backward_keys(const Saved& saved, void* d_qkv, Head head) {
  DYNAMIC_SHARED(shared);
  const int SIZE = SLAB * Tile<D>::STRIDE;
  u16* slabs = (u16*)shared;
  u16* v_tile = slabs + 4 * SIZE;
  OfRows* of_rows = (OfRows*)(v_tile + 2 * SIZE);
  int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16, t = head.seq_len;
  int key = TILE * blockIdx.x, of_warp = key + first;
  float d_k[D / 8][4] = {}, d_v[D / 8][4] = {};
  u32 last = (blockIdx.y + 1) * group_size(head);
  head.shared = blockIdx.y, head.number = blockIdx.y * group_size(head);
  u32 k[D / 16][4], v[D == 128 ? 6 : D / 16][4];
  Tile<D>::template begin<TILE>(slabs, rows_of_qkv(saved.qkv, 0, head, key, 1));
  Tile<D>::template begin<TILE>(v_tile, rows_of_qkv(saved.qkv, 0, head, key, 2));
  wait_copies();
  __syncthreads();
  keep_rows<D>(k, slabs, first);
  keep_rows<D>(v, v_tile, first);
  __syncthreads();
  int query = key;
  begin_queries<D>(slabs, of_rows[0], saved, head, query);
  for (int other = 1; head.number < last; other = 1 - other) {
    const u16 *q = slabs + (1 - other) * 2 * SIZE, *d_out = q + SIZE;
    const OfRows& rows = of_rows[1 - other];
    Head ahead = head;
    int next = query + SLAB;
    // Documents that start behind the keys see none of them, nor do those after.
    if (next >= t || start_of(head, next) >= key + TILE) next = key, ahead.number++;
    wait_copies();
    // All warps have left the other slabs.
    __syncthreads();
    if (ahead.number < last) begin_queries<D>(slabs + other * 2 * SIZE, of_rows[other], saved, ahead, next);
#pragma unroll 1
    for (int at = 0; at < SLAB && query + at < t; at += 16) {
      // Queries before this warp's first key see none of its keys, nor do those of later documents.
      if (query + at + 15 < of_warp || rows.start[at] > of_warp + 15) continue;
      // s and d are transposed: rows are keys.
      float s[2][4], d[2][4];
      two_products<T, D>(s, d, k, v, v_tile, first, q, d_out, at);
      bool all_seen = query + at >= of_warp + 15 && query + at + 16 <= t && rows.start[at + 15] <= of_warp;
      scores_backward(s, d, head, all_seen, [&](int n, int e) {
        int col = at + 8 * n + lane % 4 * 2 + e % 2;
        return Score{query + col, of_warp + lane / 4 + e / 2 * 8, rows.start[col], rows.lse[col], rows.delta[col]};
      });
      u32 a[4];
      as_rows<T>(a, s[0], s[1]);
      multiply_rows<T, D>(d_v, a, d_out, at);
      as_rows<T>(a, d[0], d[1]);
      multiply_rows<T, D>(d_k, a, q, at);
    }
    query = next, head.number = ahead.number;
  }
  i64 stride = qkv_width(head);
  __syncthreads();
  store_rows<T, D>(d_k, 1, 1, slabs, first, d_qkv, at_qkv(head, key, 1), stride, t - key, head.dim);
  store_rows<T, D>(d_v, 1, 1, slabs + 2 * SIZE, first, d_qkv, at_qkv(head, key, 2), stride, t - key, head.dim);
}

// Kernels by head dimension: up to 64 and 128. All tensors have the type of qkv.
template <int D>
INLINE void forward_of(const void* qkv, void* out, float* lse, u32 types, const Head& head) {
  with_half(type_of(types, 0), [&](auto type) { forward<decltype(type), D>(qkv, out, lse, types, head); });
}
KERNEL(128) attention_mma_64(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward_of<64>(qkv, out, lse, types, HEAD);
}
KERNEL(128) attention_mma_128(const void* qkv, void* out, float* lse, u32 types, HEAD_PARAMETERS) {
  forward_of<128>(qkv, out, lse, types, HEAD);
}

template <int D>
INLINE void queries_of(const Saved& saved, void* d_qkv, const Head& head) {
  with_half(type_of(saved.types, 0), [&](auto type) { backward_queries<decltype(type), D>(saved, d_qkv, head); });
}
template <int D>
INLINE void keys_of(const Saved& saved, void* d_qkv, const Head& head) {
  with_half(type_of(saved.types, 0), [&](auto type) { backward_keys<decltype(type), D>(saved, d_qkv, head); });
}
KERNEL(128) attention_mma_queries_64(BACKWARD_PARAMETERS) { queries_of<64>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_mma_queries_128(BACKWARD_PARAMETERS) { queries_of<128>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_mma_keys_64(BACKWARD_PARAMETERS) { keys_of<64>(SAVED, d_qkv, HEAD); }
KERNEL(128) attention_mma_keys_128(BACKWARD_PARAMETERS) { keys_of<128>(SAVED, d_qkv, HEAD); }
