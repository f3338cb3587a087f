// Grouped matmuls: the rows of each expert times the expert's own matrix. Rows offsets[e]..offsets[e + 1] belong to expert e. Its
// matrix W_e (n, k) begins `stride` elements after that of expert e - 1. There are three forms:
//   FORWARD  c (R, n) = a (R, k) W_e'            b = W
//   INPUT    c (R, k) = a (R, n) W_e             b = W
//   WEIGHT   W_e (n, k) = (add ? W_e : 0) + a_e' b_e, summed over the rows of expert e of a (R, n) and of b (R, k); c = W
// Each kernel has one block for a square of the result. The host does not know the offsets, so the grid has as many tiles of rows as
// any offsets need, and a block without rows ends at once. Each sum is in fp32, in the order of its terms, and rounded once.

#include "tensor_cores.cuh"

enum Form { FORWARD, INPUT, WEIGHT };

struct Grouped {
  const void *a, *b;
  void* c;
  const int* offsets;
  u32 types;  // types of a, b, c
  u32 add, experts;
  i64 stride;
  int n, k;
};

#define GROUPED_PARAMETERS                                                                                       \
  const void *a, const void *b, void *c, const int *offsets, u32 types, u32 add, u32 experts, i64 stride, int n, int k
#define GROUPED \
  { a, b, c, offsets, types, add, experts, stride, n, k }

INLINE int largest_of_warp(int x) {
#pragma unroll
  for (int other = 16; other; other /= 2) {
    int y = __shfl_xor_sync(0xffffffffu, x, other);
    x = y > x ? y : x;
  }
  return x;
}

// Number of the first tile of an expert's rows, if tiles have SIDE rows. Each expert has at least one tile more than its rows fill.
template <int SIDE>
INLINE int first_tile(const int* offsets, int expert) { return (int)((u32)offsets[expert] / SIDE) + expert; }

// The expert of a tile of rows: the last one whose first tile is not behind it. All lanes of a warp get the same expert. The lanes
// look at every `step`-th expert, and then at those between two of them.
template <int SIDE>
INLINE int expert_of(const int* offsets, int experts, int tile) {
  int lane = threadIdx.x % 32, step = (experts + 31) / 32, expert = lane * step;
  bool before = expert < experts && first_tile<SIDE>(offsets, expert) <= tile;
  int found = largest_of_warp(before ? expert : 0);
  expert = found + lane;
  before = lane < step && expert < experts && first_tile<SIDE>(offsets, expert) <= tile;
  return largest_of_warp(before ? expert : found);
}

// A block's square of the result: at most SIDE rows and columns exist, and each element is a sum of `depth` products. The other
// numbers are indices of elements: where the operands and the square begin, and the distances of their rows.
struct Square {
  i64 a, b, c, a_stride, b_stride, c_stride;
  int rows, cols, depth;
};

template <Form FORM, int SIDE>
INLINE Square square_of(const Grouped& of) {
  i64 n = of.n, k = of.k, col = SIDE * (i64)blockIdx.x;
  if (FORM == WEIGHT) {
    i64 expert = blockIdx.z, row = SIDE * (i64)blockIdx.y, first = of.offsets[expert];
    return {first * n + row, first * k + col, expert * of.stride + row * k + col, n, k, k, (int)(n - row), (int)(k - col),
            (int)(of.offsets[expert + 1] - first)};
  }
  int tile = blockIdx.y, expert = expert_of<SIDE>(of.offsets, of.experts, tile);
  i64 row = of.offsets[expert] + (i64)SIDE * (tile - first_tile<SIDE>(of.offsets, expert));
  int rows = (int)(of.offsets[expert + 1] - row);
  if (FORM == FORWARD) return {row * k, expert * of.stride + col * k, row * n + col, k, k, n, rows, (int)(n - col), of.k};
  return {row * n, expert * of.stride + col, row * k + col, n, k, k, rows, (int)(k - col), of.n};
}

// Whether there is nothing to write: a tile without rows, or nothing to add.
template <Form FORM>
INLINE bool is_empty(const Square& at, u32 add) { return at.rows <= 0 || (FORM == WEIGHT && add && at.depth == 0); }

// Elements i..i+count of c = v, or c + v.
INLINE void write_run(const Grouped& of, i64 i, int count, float (&v)[8]) {
  u32 type = type_of(of.types, 2);
  if (of.add) {
    float old[8];
    load8(of.c, type, i, count, old);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] += old[j];
  }
  store8(of.c, type, i, count, v);
}

// On tensor cores. A warp has a quarter of the square. Slabs of 32 terms of all sums come in turn to two places of shared memory.

#define SIDE 128
#define QUARTER 64
#define SLAB 32

// Where an operand has its terms side by side, a slab is SIDE rows of SLAB elements, else SLAB rows of SIDE elements. Volta has no
// operand a of the second kind, so there a slab is transposed as it comes.
template <class M, Form FORM>
struct Slabs {
  static const bool A_BY_TERMS = FORM == WEIGHT && M::COPIES_ASYNC, B_BY_TERMS = FORM != FORWARD;
  static const int A_SIZE = A_BY_TERMS ? SLAB * Tile<M, SIDE>::STRIDE : SIDE * Tile<M, SLAB>::STRIDE;
  static const int B_SIZE = B_BY_TERMS ? SLAB * Tile<M, SIDE>::STRIDE : SIDE * Tile<M, SLAB>::STRIDE;

  // The first SLAB rows of a matrix become the columns of a slab. A thread has 8 columns of two rows at a time.
  static INLINE void transpose(u16* to, const Rows& rows) {
#pragma unroll
    for (int i = threadIdx.x; i < SLAB / 2 * (SIDE / 8); i += 32 * M::WARPS) {
      int row = i % (SLAB / 2) * 2, col = i / (SLAB / 2) * 8, count = min(rows.width - col, 8);
      Raw pair[2];
#pragma unroll
      for (int r = 0; r < 2; r++)
        pair[r] = fetch8(rows.x, F16, rows.start + (row + r) * rows.stride + col, row + r < rows.rows ? count : 0);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        u32 low = pair[0].words[j / 2] >> (j % 2 * 16) & 0xffff, high = pair[1].words[j / 2] >> (j % 2 * 16) & 0xffff;
        *(u32*)(to + (col + j) * Tile<M, SLAB>::STRIDE + row) = low | high << 16;
      }
    }
  }

  // Begins to load the terms from `term` on, 0 outside; wait_copies and a barrier follow.
  static INLINE void begin(u16* to, const Grouped& of, const Square& at, int term) {
    int left = at.depth - term;
    if constexpr (FORM == WEIGHT) {
      Rows a = {of.a, 0, at.a + term * at.a_stride, at.a_stride, left, at.rows};
      if constexpr (A_BY_TERMS) Tile<M, SIDE>::template begin<SLAB>(to, a);
      else transpose(to, a);
    } else {
      Tile<M, SLAB>::template begin<SIDE>(to, {of.a, 0, at.a + term, at.a_stride, at.rows, left});
    }
    u16* b = to + A_SIZE;
    if constexpr (B_BY_TERMS)
      Tile<M, SIDE>::template begin<SLAB>(b, {of.b, 0, at.b + term * at.b_stride, at.b_stride, left, at.cols});
    else Tile<M, SLAB>::template begin<SIDE>(b, {of.b, 0, at.b + term, at.b_stride, at.cols, left});
  }

  static INLINE void load_a(typename M::A& a, const u16* slab, int row, int term) {
    if constexpr (A_BY_TERMS) M::load_a_transposed(a, slab + term * Tile<M, SIDE>::STRIDE + row, Tile<M, SIDE>::STRIDE);
    else Tile<M, SLAB>::load_a(a, slab, row, term);
  }
  static INLINE void load_b(typename M::B& b, const u16* slab, int col, int term) {
    if constexpr (B_BY_TERMS) Tile<M, SIDE>::load_rows(b, slab + A_SIZE, term, col);
    else Tile<M, SLAB>::load_columns(b, slab + A_SIZE, col, term);
  }
};

// Writes 64 columns of a warp's blocks of sums, 16 rows at a time. They go through the warp's own shared memory: rows of 64 numbers
// and 8 more, so that lanes that write at once use different banks.
template <class M>
INLINE void write_quarter(const float (&sums)[QUARTER / 16][QUARTER / 8][4], const Grouped& of, const Square& at, float* own,
                          int row, int col) {
  const int STRIDE = QUARTER + 8;
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < QUARTER / 16; m++) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < QUARTER / 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint2 pair;
        pair.x = __float_as_uint(sums[m][n][2 * half]), pair.y = __float_as_uint(sums[m][n][2 * half + 1]);
        *(uint2*)(own + (M::row() + half * M::ROW_STEP) * STRIDE + 8 * n + M::col()) = pair;
      }
    __syncwarp();
#pragma unroll 1
    for (int r = lane / 8; r < 16; r += 4) {
      int to_row = row + 16 * m + r, to_col = col + lane % 8 * 8, count = min(at.cols - to_col, 8);
      if (to_row >= at.rows || count <= 0) continue;
      const float* from = own + r * STRIDE + lane % 8 * 8;
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = from[j];
      write_run(of, at.c + to_row * at.c_stride + to_col, count, v);
    }
  }
}

template <class M, class T, Form FORM>
INLINE void multiply_square(const Grouped& of, const Square& at) {
  DYNAMIC_SHARED(shared);
  typedef Slabs<M, FORM> S;
  const int SIZE = S::A_SIZE + S::B_SIZE;
  u16* slabs = (u16*)shared;
  int warp = threadIdx.x / 32, row = warp / 2 * QUARTER, col = warp % 2 * QUARTER;
  float sums[QUARTER / 16][QUARTER / 8][4] = {};
  if (at.depth > 0) S::begin(slabs, of, at, 0);
#pragma unroll 1
  for (int term = 0, other = SIZE; term < at.depth; term += SLAB, other = SIZE - other) {
    const u16* slab = slabs + (SIZE - other);
    M::wait_copies();
    // All warps have left the other slabs.
    __syncthreads();
    if (term + SLAB < at.depth) S::begin(slabs + other, of, at, term + SLAB);
#pragma unroll
    for (int k = 0; k < SLAB; k += 16) {
      typename M::A a[QUARTER / 16];
#pragma unroll
      for (int m = 0; m < QUARTER / 16; m++) S::load_a(a[m], slab, row + 16 * m, k);
#pragma unroll
      for (int n = 0; n < QUARTER / 8; n += 2) {
        typename M::B b;
        S::load_b(b, slab, col + 8 * n, k);
#pragma unroll
        for (int m = 0; m < QUARTER / 16; m++)
          M::template multiply<T, S::B_BY_TERMS>(sums[m][n], sums[m][n + 1], a[m], b);
      }
    }
  }
  // All warps have left the slabs.
  __syncthreads();
  write_quarter<M>(sums, of, at, (float*)shared + warp * 16 * (QUARTER + 8), row, col);
}

template <class M, Form FORM>
INLINE void on_tensor_cores(const Grouped& of) {
  if constexpr (M::HERE) {
    Square at = square_of<FORM, SIDE>(of);
    if (is_empty<FORM>(at, of.add)) return;
    with_half<M>(type_of(of.types, 0), [&](auto type) { multiply_square<M, decltype(type), FORM>(of, at); });
  }
}

#undef SIDE
#undef QUARTER
#undef SLAB

// In fp32 arithmetic, for all types and GPUs. A thread has 4 rows and 4 columns of a square of 64.

#define PLAIN_SIDE 64
#define PLAIN_SLAB 16

// Loads a slab of an operand, widened: to[term][i], where i numbers rows of a or columns of b, `count` of which exist, as do `left`
// terms. BY_TERMS: rows of the operand in memory are terms.
template <bool BY_TERMS>
INLINE void load_plain(float (&to)[PLAIN_SLAB][PLAIN_SIDE + 4], const void* x, u32 type, i64 start, i64 stride, int count, int left) {
  with_type(type, [&](auto of) {
    int outer = threadIdx.x / (BY_TERMS ? PLAIN_SIDE / 4 : PLAIN_SLAB / 4);
    int inner = threadIdx.x % (BY_TERMS ? PLAIN_SIDE / 4 : PLAIN_SLAB / 4) * 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int term = BY_TERMS ? outer : inner + j, i = BY_TERMS ? inner + j : outer;
      to[term][i] = term < left && i < count ? get<decltype(of)>(x, start + outer * stride + inner + j) : 0.0f;
    }
  });
}

template <Form FORM>
INLINE void in_fp32(const Grouped& of) {
  __shared__ float x[PLAIN_SLAB][PLAIN_SIDE + 4], y[PLAIN_SLAB][PLAIN_SIDE + 4];
  const bool A_BY_TERMS = FORM == WEIGHT, B_BY_TERMS = FORM != FORWARD;
  Square at = square_of<FORM, PLAIN_SIDE>(of);
  if (is_empty<FORM>(at, of.add)) return;
  int row = threadIdx.x / 16 * 4, col = threadIdx.x % 16 * 4;
  float sums[4][4] = {};
#pragma unroll 1
  for (int term = 0; term < at.depth; term += PLAIN_SLAB) {
    i64 a = at.a + (A_BY_TERMS ? term * at.a_stride : term), b = at.b + (B_BY_TERMS ? term * at.b_stride : term);
    int left = at.depth - term;
    load_plain<A_BY_TERMS>(x, of.a, type_of(of.types, 0), a, at.a_stride, at.rows, left);
    load_plain<B_BY_TERMS>(y, of.b, type_of(of.types, 1), b, at.b_stride, at.cols, left);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < PLAIN_SLAB; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = fmaf(x[k][row + i], y[k][col + j], sums[i][j]);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (row + i >= at.rows || col >= at.cols) continue;
    float v[8] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3], 0.0f, 0.0f, 0.0f, 0.0f};
    write_run(of, at.c + (row + i) * at.c_stride + col, min(at.cols - col, 4), v);
  }
}

KERNEL(128) grouped_mma_forward(GROUPED_PARAMETERS) { on_tensor_cores<Ampere, FORWARD>(GROUPED); }
KERNEL(128) grouped_mma_input(GROUPED_PARAMETERS) { on_tensor_cores<Ampere, INPUT>(GROUPED); }
KERNEL(128) grouped_mma_weight(GROUPED_PARAMETERS) { on_tensor_cores<Ampere, WEIGHT>(GROUPED); }
KERNEL(128) grouped_volta_forward(GROUPED_PARAMETERS) { on_tensor_cores<Volta, FORWARD>(GROUPED); }
KERNEL(128) grouped_volta_input(GROUPED_PARAMETERS) { on_tensor_cores<Volta, INPUT>(GROUPED); }
KERNEL(128) grouped_volta_weight(GROUPED_PARAMETERS) { on_tensor_cores<Volta, WEIGHT>(GROUPED); }
KERNEL(256) grouped_forward(GROUPED_PARAMETERS) { in_fp32<FORWARD>(GROUPED); }
KERNEL(256) grouped_input(GROUPED_PARAMETERS) { in_fp32<INPUT>(GROUPED); }
KERNEL(256) grouped_weight(GROUPED_PARAMETERS) { in_fp32<WEIGHT>(GROUPED); }
