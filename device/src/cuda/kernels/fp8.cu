// Largest magnitudes, and values as fp8: 4 bits of exponent and 3 of mantissa (e4m3), or 5 and 2
// (e5m2). The formats and the scale are those of numerics/fp8.rs, bit for bit.

enum { E4M3 = 6, E5M2 = 7 };  // among the types of launch.rs
enum { MAXIMA = 256 };

INLINE float magnitude(float x) { return __uint_as_float(__float_as_uint(x) & 0x7fffffffu); }

// Magnitudes compare as their bits do: infinity and NaN stand above all numbers.
INLINE float largest(float a, float b) { return __float_as_uint(a) > __float_as_uint(b) ? a : b; }

// The largest magnitude of a block. Every thread gets it.
INLINE float block_largest(float x, float (&shared)[32]) {
  x = warp_combine(x, 32, largest);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float top = shared[0];
  for (u32 warp = 1; warp < blockDim.x / 32; warp++) top = largest(top, shared[warp]);
  return top;
}

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
  top = block_largest(top, shared);
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

// The instruction for sm_89 came with CUDA 12.1. Without it the same codes are computed.
#if !defined(ONEBOX_EMULATED) && __CUDA_ARCH__ >= 890 && \
    (__CUDA_ARCH__ >= 900 || __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201)
#define FP8_CONVERSIONS 1
#else
#define FP8_CONVERSIONS 0
#endif

// An fp8 format; `pair` rounds two values, the first into the lower byte.
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
};
struct OfE4m3 : Format<3, 7, 0x7e> {
  static INLINE u32 pair(float low, float high) {
#if FP8_CONVERSIONS
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
#else
    return code(low) | code(high) << 8;
#endif
  }
};
struct OfE5m2 : Format<2, 15, 0x7b> {
  static INLINE u32 pair(float low, float high) {
#if FP8_CONVERSIONS
    u16 both;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
#else
    return code(low) | code(high) << 8;
#endif
  }
};

// A tile of 128 rows and 64 columns: a thread has 4 rows of 8 columns.
enum { TILE_ROWS = 128, TILE_COLUMNS = 64, PATCH = 4 };

// Four rows of one column in a word; the rows are padded against bank conflicts.
typedef u32 Turned[TILE_COLUMNS][TILE_ROWS / PATCH + 1];

// Rounds this thread's patch of x (rows, cols) into y, if there is one, and into the tile.
template <class T, class F>
INLINE void round_patch(const void* x, u32* y, i64 at, i64 cols, float inverse, Turned& tile) {
  float v[PATCH][8];
#pragma unroll
  for (int i = 0; i < PATCH; i++) {
    const typename T::Stored* from = (const typename T::Stored*)x + at + i * cols;
    if (sizeof(typename T::Stored) == 4) {
      float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
      v[i][0] = a.x, v[i][1] = a.y, v[i][2] = a.z, v[i][3] = a.w;
      v[i][4] = b.x, v[i][5] = b.y, v[i][6] = b.z, v[i][7] = b.w;
    } else {
      uint4 raw = *(const uint4*)from;
      u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int j = 0; j < 8; j++) v[i][j] = T::widen((u16)(words[j / 2] >> (j % 2 * 16)));
    }
  }
  u32 codes[PATCH][4];  // pairs of columns
#pragma unroll
  for (int i = 0; i < PATCH; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) codes[i][j] = F::pair(v[i][2 * j] * inverse, v[i][2 * j + 1] * inverse);
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

// scale = that of the largest of `maxima`; y (rows, cols) = x / scale; turned (cols, rows) the same
// transposed. y or turned may be null. Rows and columns are multiples of 16. One block of 256
// threads per tile, as many as there are maxima.
KERNEL(256) quantize(const void* x, const float* maxima, void* y, void* turned, float* scale, u32 types, i64 rows,
                     i64 cols, float limit) {
  __shared__ float shared[32];
  __shared__ Turned tile;
  float factor = scale_of(block_largest(maxima[threadIdx.x], shared), limit), inverse = 1.0f / factor;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *scale = factor;
  i64 first_row = (i64)blockIdx.y * TILE_ROWS, first_column = (i64)blockIdx.x * TILE_COLUMNS;
  u32 lane = threadIdx.x % 32;
  i64 row = first_row + threadIdx.x / 32 * 16 + lane / 8 * PATCH, column = first_column + lane % 8 * 8;
  if (row < rows && column < cols)
    with_type(type_of(types, 0), [&](auto t) {
      i64 at = row * cols + column;
      if (type_of(types, 1) == E4M3) round_patch<decltype(t), OfE4m3>(x, (u32*)y, at, cols, inverse, tile);
      else round_patch<decltype(t), OfE5m2>(x, (u32*)y, at, cols, inverse, tile);
    });
  if (!turned) return;
  __syncthreads();
  row = first_row + threadIdx.x % 8 * 16;
  for (u32 own = threadIdx.x / 8; own < TILE_COLUMNS; own += 32) {
    column = first_column + own;
    if (row >= rows || column >= cols) continue;
    const u32* words = &tile[own][threadIdx.x % 8 * 4];
    *(uint4*)((unsigned char*)turned + column * rows + row) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
