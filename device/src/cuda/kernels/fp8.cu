// Largest magnitudes, and values as fp8: 4 bits of exponent and 3 of mantissa (e4m3), or 5 and 2
// (e5m2). The formats and the scale are those of numerics/fp8.rs, bit for bit.

enum { E4M3 = 6, E5M2 = 7 };  // among the types of launch.rs
enum { MAXIMA = 256 };

INLINE float magnitude(float x) { return __uint_as_float(__float_as_uint(x) & 0x7fffffffu); }

// Magnitudes compare as their bits do: infinity and NaN stand above all numbers.
INLINE float largest(float a, float b) { return __float_as_uint(a) > __float_as_uint(b) ? a : b; }

// maxima (MAXIMA) = the largest magnitudes of runs of `run` elements of x (n).
KERNEL(512) maxima(const void* x, float* maxima, u32 types, i64 n, i64 run) {
  __shared__ float shared[32];
  i64 first = blockIdx.x * run, end = first + run < n ? first + run : n;
  float top = 0.0f;
  for (i64 i = first + 8 * threadIdx.x; i < end; i += 8 * blockDim.x) {
    float v[8];
    load8(x, type_of(types, 0), i, run_length(i, end), v);
#pragma unroll
    for (int j = 0; j < 8; j++) top = largest(top, magnitude(v[j]));
  }
  top = block_combine(top, shared, largest);
  if (threadIdx.x == 0) maxima[blockIdx.x] = top;
}

// The least power of two that brings `maximum` within `limit`, at least 2^-126; 1 for 0, NaN for a
// maximum that is not finite.
INLINE float scale_of(float maximum, float limit) {
  if (__float_as_uint(maximum) >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  if (maximum == 0.0f) return 1.0f;
  u32 exponent = (__float_as_uint(maximum / limit) + 0x007fffffu) >> 23;
  return __uint_as_float((exponent ? exponent : 1u) << 23);
}

// An fp8 format; `pair` rounds two values, the first into the lower byte. The instruction for sm_89 came with CUDA 12.1;
// without it the same codes are computed.
template <u32 MANTISSA, u32 BIAS, u32 LARGEST>
struct Format {
  static INLINE u32 code(float x) {
    u32 sign = __float_as_uint(x) >> 24 & 0x80, bits = __float_as_uint(x) & 0x7fffffffu;
    if (bits > 0x7f800000u) return 0x7f;
    const u32 dropped = 23 - MANTISSA, rebias = (127 - BIAS) << 23, least_normal = rebias + (1 << 23);
    const u32 magic = least_normal + (dropped << 23);
    u32 subnormal = __float_as_uint(__uint_as_float(bits) + __uint_as_float(magic)) - magic;
    u32 normal = (bits + ((1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) - rebias) >> dropped;
    u32 all = bits < least_normal ? subnormal : normal;
    return sign | (all > LARGEST ? LARGEST : all);
  }
  static INLINE u32 pair(float low, float high) { return code(low) | code(high) << 8; }
};
#if !defined(ONEBOX_EMULATED) && __CUDA_ARCH__ >= 890 && \
    (__CUDA_ARCH__ >= 900 || __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201)
#define PAIR(type)                                                                                            \
  static INLINE u32 pair(float low, float high) {                                                             \
    u16 both;                                                                                                 \
    asm("cvt.rn.satfinite." type "x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));                    \
    return both;                                                                                              \
  }
#else
#define PAIR(type)
#endif
struct OfE4m3 : Format<3, 7, 0x7e> {
  PAIR("e4m3")
};
struct OfE5m2 : Format<2, 15, 0x7b> {
  PAIR("e5m2")
};

// A tile of 128 rows and 64 columns: a thread has 4 rows of 8 columns.
enum { TILE_ROWS = 128, TILE_COLUMNS = 64, PATCH = 4 };

// Four rows of one column in a word; the rows are padded against bank conflicts.
typedef u32 TransposedTile[TILE_COLUMNS][TILE_ROWS / PATCH + 1];

// Rounds this thread's patch of x (rows, cols) into y, if there is one, and into the tile.
template <class F>
INLINE void round_patch(const void* x, u32 type, u32* y, i64 at, i64 cols, float inverse, TransposedTile& tile) {
  Raw raw[PATCH];
#pragma unroll
  for (int i = 0; i < PATCH; i++) raw[i] = fetch8(x, type, at + i * cols, 8);
  u32 codes[PATCH][4];  // pairs of columns
#pragma unroll
  for (int i = 0; i < PATCH; i++) {
    float v[8];
    widen8(raw[i], type, v);
#pragma unroll
    for (int j = 0; j < 4; j++) codes[i][j] = F::pair(v[2 * j] * inverse, v[2 * j + 1] * inverse);
    if (y) {
      u32* to = y + (at + i * cols) / 4;
      to[0] = codes[i][0] | codes[i][1] << 16;
      to[1] = codes[i][2] | codes[i][3] << 16;
    }
  }
  u32 lane = threadIdx.x % 32, column = lane % 8 * 8, word = threadIdx.x / 32 * 4 + lane / 8;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    u32 four = 0;
#pragma unroll
    for (int i = 0; i < PATCH; i++) four |= (codes[i][j / 2] >> (j % 2 * 8) & 0xff) << (8 * i);
    tile[column + j][word] = four;
  }
}

// scale = that of the largest of `maxima`; y (rows, cols) = x / scale; transposed (cols, rows) = the
// transpose of y. y or transposed may be null. Rows and columns are multiples of 16. One block of 256
// threads per tile, as many as there are maxima.
KERNEL(256) quantize(const void* x, const float* maxima, void* y, void* transposed, float* scale, u32 types,
                     i64 rows, i64 cols, float limit) {
  __shared__ float shared[32];
  __shared__ TransposedTile tile;
  float factor = scale_of(block_combine(maxima[threadIdx.x], shared, largest), limit), inverse = 1.0f / factor;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *scale = factor;
  i64 first_row = (i64)blockIdx.y * TILE_ROWS, first_column = (i64)blockIdx.x * TILE_COLUMNS;
  u32 lane = threadIdx.x % 32;
  i64 row = first_row + threadIdx.x / 32 * 16 + lane / 8 * PATCH, column = first_column + lane % 8 * 8;
  if (row < rows && column < cols) {
    u32 type = type_of(types, 0);
    i64 at = row * cols + column;
    if (type_of(types, 1) == E4M3) round_patch<OfE4m3>(x, type, (u32*)y, at, cols, inverse, tile);
    else round_patch<OfE5m2>(x, type, (u32*)y, at, cols, inverse, tile);
  }
  if (!transposed) return;
  __syncthreads();
  row = first_row + threadIdx.x % 8 * 16;
  for (u32 own = threadIdx.x / 8; own < TILE_COLUMNS; own += 32) {
    column = first_column + own;
    if (row >= rows || column >= cols) continue;
    const u32* words = &tile[own][threadIdx.x % 8 * 4];
    *(uint4*)((unsigned char*)transposed + column * rows + row) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}
