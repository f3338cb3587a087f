// Products of 16 x 16 blocks on tensor cores with fp32 sums, and tiles in shared memory, for two kinds of GPUs: Ampere and
// later (m16n8k16, cp.async), and Volta (m8n8k4). A warp takes part as a whole.
//
// Of a 16 x 16 block of sums, a lane has rows row() and row() + ROW_STEP, columns col(), the next, and these + 8: sums[n][e]
// is of column 8 n + col() + e % 2 and of the first or second row by e / 2. Lanes whose numbers differ in bits of
// ROW_LANES alone have the same rows.

#ifdef ONEBOX_EMULATED
INLINE float exp2_fast(float x) { return exp2f(x); }
INLINE int min(int a, int b) { return a < b ? a : b; }
#else
INLINE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

template <class T>
INLINE u32 pack(float low, float high) {
  return (u32)T::round(low) | (u32)T::round(high) << 16;
}

struct Ampere {
#if defined(ONEBOX_EMULATED) || __CUDA_ARCH__ >= 800
  static const bool HERE = true;
#else
  static const bool HERE = false;
#endif
  // Warps of a block.
  static const int WARPS = 4;
  // Rows of a slab of keys or queries.
  static const int SLAB = 32;
  // Blocks of 16 queries of a warp, forward: an operand b, once loaded, serves the products of all.
  static const int BLOCKS = 2;
  // Whether the forward kernel keeps queries in registers, and how many operands, of 16 columns each, of d_out and of v the
  // backward kernels keep there. More of them spill.
  static const bool KEEPS_FORWARD = false;
  static const int KEPT_D_OUT = 8, KEPT_V = 6;
  static const bool HAS_BF16 = true, COPIES_ASYNC = true, CAPPED = false;
  static const int ROW_STEP = 8, ROW_LANES = 3;
  static INLINE int row() { return threadIdx.x % 32 / 4; }
  static INLINE int col() { return threadIdx.x % 4 * 2; }
  typedef u32 A[4];
  typedef u32 B[4];

  // Begins to copy 16 bytes to shared memory (0 where they do not exist). They are there after wait_copies, and for other
  // threads after a barrier behind it.
  static INLINE void begin_copy(u16* to, const u16* from, bool exists) {
#ifdef ONEBOX_EMULATED
    *(uint4*)to = exists ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(exists ? 16 : 0)
                 : "memory");
#endif
  }
  // The same of 4 bytes.
  static INLINE void begin_copy_word(void* to, const void* from, bool exists) {
#ifdef ONEBOX_EMULATED
    *(u32*)to = exists ? *(const u32*)from : 0;
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(exists ? 4 : 0)
                 : "memory");
#endif
  }
  static INLINE void wait_copies() {
#if !defined(ONEBOX_EMULATED) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  }

  // Loads four 8 x 8 matrices, or their transposes. Lane l gives the row l % 8 of matrix l / 8, and gets row l / 4,
  // columns 2 (l % 4) and the next.
  static INLINE void load(u32 (&x)[4], const u16* row) {
#ifdef ONEBOX_EMULATED
    emulator::ldmatrix(x, row, false);
#elif __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((u32)__cvta_generic_to_shared(row)));
#endif
  }
  static INLINE void load_transposed(u32 (&x)[4], const u16* row) {
#ifdef ONEBOX_EMULATED
    emulator::ldmatrix(x, row, true);
#elif __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((u32)__cvta_generic_to_shared(row)));
#endif
  }

  // Operand a: the 16 x 16 block whose first element is at `block`, in rows that are `stride` apart.
  static INLINE void load_a(A& a, const u16* block, int stride) {
    u32 lane = threadIdx.x % 32;
    load(a, block + lane % 16 * stride + lane / 16 * 8);
  }
  // Operand a, a[m][k] = block[k][m].
  static INLINE void load_a_transposed(A& a, const u16* block, int stride) {
    u32 lane = threadIdx.x % 32;
    load_transposed(a, block + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8);
  }
  // Operand b, b[k][n] = block[n][k].
  static INLINE void load_columns(B& b, const u16* block, int stride) {
    u32 lane = threadIdx.x % 32;
    load(b, block + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8);
  }
  // Operand b, b[k][n] = block[k][n].
  static INLINE void load_rows(B& b, const u16* block, int stride) {
    u32 lane = threadIdx.x % 32;
    load_transposed(b, block + lane % 16 * stride + lane / 16 * 8);
  }
  // Converts a block of sums to an operand a.
  template <class T>
  static INLINE void as_a(A& a, const float (&left)[4], const float (&right)[4]) {
    a[0] = pack<T>(left[0], left[1]), a[1] = pack<T>(left[2], left[3]);
    a[2] = pack<T>(right[0], right[1]), a[3] = pack<T>(right[2], right[3]);
  }

  // d (16, 8) += a (16, 16) b (16, 8)
  template <class T>
  static INLINE void half_product(float (&d)[4], const A& a, u32 b0, u32 b1);
  // The block left, right += a b, for an operand b by columns or by rows.
  template <class T, bool ROWS>
  static INLINE void multiply(float (&left)[4], float (&right)[4], const A& a, const B& b) {
    half_product<T>(left, a, b[0], b[1]);
    half_product<T>(right, a, b[2], b[3]);
  }
};

#ifdef ONEBOX_EMULATED
template <class T>
INLINE void Ampere::half_product(float (&d)[4], const A& a, u32 b0, u32 b1) {
  emulator::mma_16816(d, a, b0, b1, T::widen);
}
#else
#define MMA(type)                                                                                                   \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                               \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                               \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <>
INLINE void Ampere::half_product<OfF16>(float (&d)[4], const A& a, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  MMA("f16");
#endif
}
template <>
INLINE void Ampere::half_product<OfBf16>(float (&d)[4], const A& a, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  MMA("bf16");
#endif
}
#undef MMA
#endif

// For heads of up to 256: sums of 16 rows and all columns take 128 registers of a thread, so a warp has one block of queries. A
// block has 8 warps, as many as registers permit, which share each slab. A slab is short, so that all slabs fit beside other
// things into the 101376 bytes of shared memory that a block has on sm_86, 89 and 120.
struct AmpereWide : Ampere {
  static const int WARPS = 8, SLAB = 16, BLOCKS = 1;
  static const bool KEEPS_FORWARD = true;
};

// For heads of 65 to 128 if a multiprocessor has 100 KiB of shared memory. A block of the forward kernel takes 34816 bytes, and one of
// the kernel by keys 35200. So two blocks share a multiprocessor, each scheduler has two warps, and one warp computes products while
// the other computes weights. A warp has one block of queries. launch/attention.rs chooses these kernels for the same GPUs.
struct AmpereSmall : Ampere {
#if defined(ONEBOX_EMULATED) || (__CUDA_ARCH__ >= 860 && __CUDA_ARCH__ < 900 && __CUDA_ARCH__ != 870) || __CUDA_ARCH__ >= 1200
  static const bool HERE = true;
#else
  static const bool HERE = false;
#endif
  static const int BLOCKS = 1;
  static const bool KEEPS_FORWARD = true;
};

// The same for the kernel by keys, which also has a tile of values in shared memory.
struct AmpereSmallByKeys : AmpereSmall {
  static const int SLAB = 16;
};

// For heads of 65 to 128 on all other multiprocessors from Ampere on.
struct AmpereLarge : Ampere {
#ifdef ONEBOX_EMULATED
  static const bool HERE = true;
#else
  static const bool HERE = Ampere::HERE && !AmpereSmall::HERE;
#endif
};

// f16 only. m8n8k4 multiplies an 8 x 8 block for each of four groups of lanes, l / 4 % 4 = g (16 apart, too). Group g has
// rows 4 (g % 2).. and 8 more, columns 4 (g / 2).. and 8 more of a 16 x 16 block: lanes that read at once so read four or eight
// neighbouring rows, of different banks.
struct Volta {
#if defined(ONEBOX_EMULATED) || (__CUDA_ARCH__ >= 700 && __CUDA_ARCH__ < 800)
  static const bool HERE = true;
#else
  static const bool HERE = false;
#endif
  static const int WARPS = 4, SLAB = 16, BLOCKS = 1, KEPT_D_OUT = 4, KEPT_V = 1;
  static const bool KEEPS_FORWARD = true, HAS_BF16 = false, COPIES_ASYNC = false, CAPPED = false;
  static const int ROW_STEP = 2, ROW_LANES = 10;
  static INLINE int row() { return (threadIdx.x & 1) + (threadIdx.x & 4) + (threadIdx.x & 16) / 2; }
  static INLINE int col() { return (threadIdx.x & 2) + (threadIdx.x & 8) / 2; }
  // Two elements each; all of a row of a, or of a column of b. By rows, four elements of every fourth row of b.
  typedef u32 A[8];
  typedef u32 B[8];

  // There is no copy that goes on by itself.
  static INLINE void begin_copy(u16* to, const u16* from, bool exists) {
    *(uint4*)to = exists ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
  }
  static INLINE void begin_copy_word(void* to, const void* from, bool exists) { *(u32*)to = exists ? *(const u32*)from : 0; }
  static INLINE void wait_copies() {}

  static INLINE void load_16(u32 (&x)[8], const u16* from) {
    uint4 low = *(const uint4*)from, high = *(const uint4*)(from + 8);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  }
  static INLINE void load_a(A& a, const u16* block, int stride) {
    u32 lane = threadIdx.x % 32;
    load_16(a, block + (lane % 8 + lane / 16 * 8) * stride);
  }
  static INLINE void load_columns(B& b, const u16* block, int stride) {
    u32 lane = threadIdx.x % 32;
    load_16(b, block + (lane % 4 + lane / 8 * 4) * stride);
  }
  static INLINE void load_rows(B& b, const u16* block, int stride) {
    u32 lane = threadIdx.x % 32;
    const u16* from = block + lane % 4 * stride + lane / 8 * 4;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      uint2 x = *(const uint2*)(from + 4 * k * stride);
      b[2 * k] = x.x, b[2 * k + 1] = x.y;
    }
  }
  // A lane has two columns of each of two rows, twice, and gets all columns of one row. The lane two further has the two columns
  // beside these, and the lane eight further the other four columns.
  template <class T>
  static INLINE void as_a(A& a, const float (&left)[4], const float (&right)[4]) {
    bool second = threadIdx.x & 2, other_columns = threadIdx.x & 8;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float(&x)[4] = n ? right : left;
      u32 rows[2] = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3])};
      u32 mine = second ? rows[1] : rows[0];
      u32 beside = __shfl_xor_sync(0xffffffffu, second ? rows[0] : rows[1], 2);
      u32 four[2] = {second ? beside : mine, second ? mine : beside};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 other = __shfl_xor_sync(0xffffffffu, four[i], 8);
        a[4 * n + i] = other_columns ? other : four[i], a[4 * n + 2 + i] = other_columns ? four[i] : other;
      }
    }
  }

  template <class T, bool ROWS>
  static INLINE void multiply(float (&left)[4], float (&right)[4], const A& a, const B& b) {
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
#ifdef ONEBOX_EMULATED
      emulator::mma_884(left, right, a[k], a[k + 1], b[k], b[k + 1], ROWS, T::widen);
#else
#define MMA(layout)                                                                                                 \
  asm volatile("mma.sync.aligned.m8n8k4.row." layout                                                                \
               ".f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "                          \
               "{%0, %1, %2, %3, %4, %5, %6, %7};"                                                                  \
               : "+f"(left[0]), "+f"(left[1]), "+f"(left[2]), "+f"(left[3]), "+f"(right[0]), "+f"(right[1]),        \
                 "+f"(right[2]), "+f"(right[3])                                                                     \
               : "r"(a[k]), "r"(a[k + 1]), "r"(b[k]), "r"(b[k + 1]))
      if (ROWS) MMA("row");
      else MMA("col");
#undef MMA
#endif
    }
  }
};

// Calls f with the type, F16 or BF16. GPUs without M never launch kernels of M, and there these are empty.
template <class M, class F>
INLINE void with_half(u32 type, F f) {
  if constexpr (M::HERE) {
    if (!M::HAS_BF16 || type == F16) f(OfF16());
    else if constexpr (M::HAS_BF16) f(OfBf16());
  }
}

// Combines values over the lanes that have the same rows.
template <class M, class F>
INLINE float combine_row(float x, F f) {
#pragma unroll
  for (int other = 8; other; other /= 2)
    if (M::ROW_LANES & other) x = f(x, __shfl_xor_sync(0xffffffffu, x, other));
  return x;
}

// Tiles in shared memory: rows of D elements and 8 more, so that 8 rows are in different banks.
template <class M, int D>
struct Tile {
  static const int STRIDE = D + 8, THREADS = 32 * M::WARPS;

  // The row of which a thread copies 8 elements. Eight threads write at once: of 32 columns, two rows. Rows 4 apart are in different
  // banks; neighbouring rows share some.
  static INLINE int row_of_copy() {
    int row = threadIdx.x / (D / 8);
    return D == 32 ? row / 8 * 8 + row % 2 * 4 + row % 8 / 2 : row;
  }

  // Begins to load the first ROWS rows, 0 outside; wait_copies and a barrier follow.
  template <int ROWS>
  static INLINE void begin(u16* to, const Rows& rows) {
    const u16* from = (const u16*)rows.x + rows.start;
    if (!aligned(from) || (rows.stride | rows.width) % 8) {
#pragma unroll 1
      for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
        int row = i / D, col = i % D;
        to[row * STRIDE + col] = row < rows.rows && col < rows.width ? from[row * rows.stride + col] : (u16)0;
      }
      return;
    }
    int row = row_of_copy(), col = threadIdx.x % (D / 8) * 8;
    const int STEP = THREADS / (D / 8);
    to += row * STRIDE + col, from += row * rows.stride + col;
    int count = col < rows.width ? rows.rows - row : 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, to += STEP * STRIDE, from += STEP * rows.stride)
      M::begin_copy(to, from, i < count);
  }

  // The same of two matrices, one behind the other, where copies do not go on by themselves: all loads precede the stores.
  template <int ROWS>
  static INLINE void begin_pair(u16* to, const Rows& first, const Rows& second) {
    const u16 *from[2] = {(const u16*)first.x + first.start, (const u16*)second.x + second.start};
    bool wide = aligned(from[0]) && aligned(from[1]) && (first.stride | first.width | second.stride | second.width) % 8 == 0;
    if (!wide) {
      begin<ROWS>(to, first);
      begin<ROWS>(to + ROWS * STRIDE, second);
      return;
    }
    const int STEP = THREADS / (D / 8), LOADS = ROWS / STEP;
    int row = threadIdx.x / (D / 8), col = threadIdx.x % (D / 8) * 8;
    uint4 x[2][LOADS];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const Rows& rows = m ? second : first;
      int count = col < rows.width ? rows.rows - row : 0;
#pragma unroll
      for (int i = 0; i < LOADS; i++)
        x[m][i] = i * STEP < count ? *(const uint4*)(from[m] + (row + i * STEP) * rows.stride + col) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < LOADS; i++) *(uint4*)(to + (m * ROWS + row + i * STEP) * STRIDE + col) = x[m][i];
  }

  // Operands of the block at row `row` and column `col` of a tile.
  static INLINE void load_a(typename M::A& a, const u16* tile, int row, int col) {
    M::load_a(a, tile + row * STRIDE + col, STRIDE);
  }
  static INLINE void load_columns(typename M::B& b, const u16* tile, int row, int col) {
    M::load_columns(b, tile + row * STRIDE + col, STRIDE);
  }
  static INLINE void load_rows(typename M::B& b, const u16* tile, int row, int col) {
    M::load_rows(b, tile + row * STRIDE + col, STRIDE);
  }
};

// sums (16, 8 N) += a (16, 16) times the first columns of rows `row`.. of the tile.
template <class M, class T, int D, int N>
INLINE void multiply_rows(float (&sums)[N][4], const typename M::A& a, const u16* tile, int row) {
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    typename M::B b;
    Tile<M, D>::load_rows(b, tile, row, 8 * n);
    M::template multiply<T, true>(sums[n], sums[n + 1], a, b);
  }
}

// y = this warp's 16 rows of sums from row `first` on, each times its factor, for existing rows. They go through the same
// rows of a tile, which no other warp may use any more.
template <class M, class T, int D>
INLINE void store_rows(const float (&sums)[D / 8][4], float factor_0, float factor_1, u16* tile, int first, void* y,
                       i64 start, i64 stride, int rows, int width) {
  const int STRIDE = Tile<M, D>::STRIDE;
  int lane = threadIdx.x % 32;
  u16* row = tile + (first + M::row()) * STRIDE + M::col();
  __syncwarp();
#pragma unroll
  for (int n = 0; n < D / 8; n++) {
    *(u32*)(row + 8 * n) = pack<T>(sums[n][0] * factor_0, sums[n][1] * factor_0);
    *(u32*)(row + M::ROW_STEP * STRIDE + 8 * n) = pack<T>(sums[n][2] * factor_1, sums[n][3] * factor_1);
  }
  __syncwarp();
  int col = lane % (D / 8) * 8;
#pragma unroll 1
  for (int r = first + lane / (D / 8); r < first + 16 && r < rows; r += 32 / (D / 8)) {
    const u16* from = tile + r * STRIDE + col;
    u16* to = (u16*)y + start + r * stride + col;
    if (col + 8 <= width && aligned(to)) *(uint4*)to = *(const uint4*)from;
    else
      for (int j = 0; j < 8 && col + j < width; j++) to[j] = from[j];
  }
}
