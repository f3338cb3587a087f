// Activations, bias, dropout, additions, conversions; sums of columns; sums of squares; sums over ranks.

// 2 sqrt(2 / pi), and the same times 0.044715.
#define GELU_1 1.595769f
#define GELU_3 0.071354814f

// x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which avoids cancellation.
INLINE float gelu_of(float x) {
  float u = x * fmaf(x * x, GELU_3, GELU_1);
  return x / (1.0f + exponential(-u));
}

INLINE float gelu_slope(float x) {
  // Beyond 10 the slope is 0 or 1 to the last bit, and e^-u would overflow.
  x = x > 10.0f ? 10.0f : x;
  x = x < -10.0f ? -10.0f : x;
  float u = x * fmaf(x * x, GELU_3, GELU_1);
  float e = exponential(-u);
  float s = 1.0f / (1.0f + e);
  float x_du = x * fmaf(x * x, 3.0f * GELU_3, GELU_1);
  return fmaf(x_du * (e * s), s, s);
}

// y = gelu(x)
KERNEL(256) gelu(const void* x, void* y, u32 types, i64 n) {
  for (i64 i = first_run(); i < n; i += next_run()) {
    int count = run_length(i, n);
    float v[8];
    load8(x, type_of(types, 0), i, count, v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = gelu_of(v[j]);
    store8(y, type_of(types, 1), i, count, v);
  }
}

// d = d gelu'(x)
KERNEL(256) gelu_backward(const void* x, void* d, u32 types, i64 n) {
  for (i64 i = first_run(); i < n; i += next_run()) {
    int count = run_length(i, n);
    float v[8], dv[8];
    load8(x, type_of(types, 0), i, count, v);
    load8(d, type_of(types, 1), i, count, dv);
#pragma unroll
    for (int j = 0; j < 8; j++) dv[j] = dv[j] * gelu_slope(v[j]);
    store8(d, type_of(types, 1), i, count, dv);
  }
}

// into += x
KERNEL(256) add(const void* x, void* into, u32 types, i64 n) {
  for (i64 i = first_run(); i < n; i += next_run()) {
    int count = run_length(i, n);
    float v[8], sum[8];
    load8(x, type_of(types, 0), i, count, v);
    load8(into, type_of(types, 1), i, count, sum);
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += v[j];
    store8(into, type_of(types, 1), i, count, sum);
  }
}

KERNEL(256) add_f64(const double* x, double* into, i64 n) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i < n; i += (i64)gridDim.x * blockDim.x) into[i] += x[i];
}

// y = x
KERNEL(256) cast(const void* x, void* y, u32 types, i64 n) {
  for (i64 i = first_run(); i < n; i += next_run()) {
    int count = run_length(i, n);
    float v[8];
    load8(x, type_of(types, 0), i, count, v);
    store8(y, type_of(types, 1), i, count, v);
  }
}

// y = x through f32, where one of them is F64 or I32. It serves a few scalars.
KERNEL(256) cast_exact(const void* x, void* y, u32 types, i64 n) {
  u32 from = type_of(types, 0), to = type_of(types, 1);
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i < n; i += (i64)gridDim.x * blockDim.x) {
    float v = from == F64   ? (float)((const double*)x)[i]
              : from == I32 ? (float)((const int*)x)[i]
                            : load1(x, from, i);
    if (to == F64) ((double*)y)[i] = v;
    else if (to == I32) ((int*)y)[i] = __float2int_rz(v);
    else store1(y, to, i, v);
  }
}

// Handles the first and last bytes of a range, which no wide access covers, one by one. Both ranges
// have the same alignment.
template <class Byte, class Wide>
INLINE void by_bytes(u64 at, i64 bytes, Byte one, Wide wide) {
  i64 head = (16 - (at & 15)) & 15;
  head = head < bytes ? head : bytes;
  i64 runs = (bytes - head) / 16, tail = head + 16 * runs;
  i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  for (i64 i = thread; i < runs; i += (i64)gridDim.x * blockDim.x) wide(head + 16 * i);
  if (thread < head) one(thread);
  if (thread < bytes - tail) one(tail + thread);
}

KERNEL(256) zero(char* x, i64 bytes) {
  by_bytes((u64)x, bytes, [&](i64 i) { x[i] = 0; }, [&](i64 i) { *(uint4*)(x + i) = make_uint4(0, 0, 0, 0); });
}

// y = x, bit for bit.
KERNEL(256) copy_bytes(const char* x, char* y, i64 bytes) {
  if (((u64)x & 15) == ((u64)y & 15)) {
    by_bytes((u64)x, bytes, [&](i64 i) { y[i] = x[i]; }, [&](i64 i) { *(uint4*)(y + i) = *(const uint4*)(x + i); });
    return;
  }
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i < bytes; i += (i64)gridDim.x * blockDim.x) y[i] = x[i];
}

// y = factor dropout(x); x and y may be the same. `first` is the global index of the first element.
KERNEL(256) dropout(const void* x, void* y, u32 types, i64 n, u64 first, float factor, u64 key, u32 threshold,
                    float scale) {
  Mask mask = {key, threshold, scale};
  for (i64 i = first_run(); i < n; i += next_run()) {
    int count = run_length(i, n);
    float v[8];
    load8(x, type_of(types, 0), i, count, v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = masked(mask, first + i + j, v[j]) * factor;
    store8(y, type_of(types, 1), i, count, v);
  }
}

// y (rows, cols) = dropout(x), or with `add` y += dropout(x), of columns of a tensor with `all` columns. `first` is
// the index of the first element in that tensor.
KERNEL(256) column_dropout(const void* x, void* y, u32 types, i64 rows, i64 cols, u64 first, u64 all, u32 add, u64 key,
                           u32 threshold, float scale) {
  Mask mask = {key, threshold, scale};
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      i64 i = row * cols + col;
      u64 at = first + row * all + col;
      float v[8], old[8];
      load8(x, type_of(types, 0), i, count, v);
      if (add) load8(y, type_of(types, 1), i, count, old);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = add ? old[j] + masked(mask, at + j, v[j]) : masked(mask, at + j, v[j]);
      store8(y, type_of(types, 1), i, count, v);
    }
  }
}

// y (rows, cols) = residual + factor dropout(x + bias (cols)); without a bias, bias is null.
KERNEL(256) bias_dropout_add(const void* x, const void* bias, const void* residual, void* y, u32 types, i64 rows,
                             i64 cols, u64 first, float factor, u64 key, u32 threshold, float scale) {
  Mask mask = {key, threshold, scale};
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      i64 i = row * cols + col;
      float v[8], b[8], r[8];
      load8(x, type_of(types, 0), i, count, v);
#pragma unroll
      for (int j = 0; j < 8; j++) b[j] = -0.0f;
      if (bias) load8(bias, type_of(types, 1), col, count, b);
      load8(residual, type_of(types, 2), i, count, r);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = masked(mask, first + i + j, v[j] + b[j]) * factor + r[j];
      store8(y, type_of(types, 3), i, count, v);
    }
  }
}

// c (rows, cols) += bias (cols), after a product whose library adds no bias.
KERNEL(256) add_bias(void* c, const void* bias, u32 types, i64 rows, i64 cols) {
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    for (i64 col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
      int count = run_length(col, cols);
      float v[8], b[8];
      load8(c, type_of(types, 0), row * cols + col, count, v);
      load8(bias, type_of(types, 1), col, count, b);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] += b[j];
      store8(c, type_of(types, 0), row * cols + col, count, v);
    }
  }
}

// y (cols) = sums over the rows of x (rows, cols). A block has 32 columns. Its warp w adds rows w,
// w + 32, ..., and the 32 sums are added in order.
KERNEL(1024) column_sum(const void* x, void* y, u32 types, i64 rows, i64 cols) {
  __shared__ float sums[32][32];
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 col = 32 * (i64)blockIdx.x + lane;
  float sum = 0.0f;
  with_type(type_of(types, 0), [&](auto type) {
    if (col >= cols) return;
#pragma unroll 4
    for (i64 row = warp; row < rows; row += 32) sum += get<decltype(type)>(x, row * cols + col);
  });
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && col < cols) {
    for (int other = 1; other < 32; other++) sum += sums[other][lane];
    store1(y, type_of(types, 1), col, sum);
  }
}

// partials (chunks) = sums of squares of runs of `chunk` elements. Only elements below `counted`
// and outside `hole`..`hole_end` count. Element i of a run goes to sum i mod 16, and the sums are
// added in order. 16 threads have one run, and small blocks of them spread a few runs over all
// multiprocessors. While a thread adds up a batch, it loads the next one.
KERNEL(64) chunk_squares(const void* x, double* partials, u32 types, i64 n, i64 chunk, i64 counted, i64 hole, i64 hole_end,
                         i64 chunks) {
  enum { BATCH = 64 };
  __shared__ double sums[64];
  i64 run = 4 * (i64)blockIdx.x + threadIdx.x / 16;
  i64 end = (run + 1) * chunk;
  end = end < n ? end : n;
  end = end < counted ? end : counted;
  double sum = 0.0;
  with_type(type_of(types, 0), [&](auto type) {
    typedef decltype(type) Type;
    typedef typename Type::Stored Stored;
    const Stored* at = (const Stored*)x;
    Stored next[BATCH];
    i64 first = run * chunk + threadIdx.x % 16;
#pragma unroll
    for (int j = 0; j < BATCH; j++) next[j] = first + 16 * j < end ? at[first + 16 * j] : (Stored)0;
    for (i64 i = first; i < end; i += 16 * BATCH) {
      Stored now[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        now[j] = next[j];
        i64 later = i + 16 * (BATCH + j);
        next[j] = later < end ? at[later] : (Stored)0;
      }
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        i64 own = i + 16 * j;
        double v = hole <= own && own < hole_end ? 0.0 : Type::widen(now[j]);
        sum = fma(v, v, sum);  // the square is exact; that of 0 changes nothing
      }
    }
  });
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x % 16 == 0 && run < chunks) {
    for (int other = 1; other < 16; other++) sum += sums[threadIdx.x + other];
    partials[run] = sum;
  }
}

// Addresses of the ranks' parts; the first `ranks` of them count. Only unrolled loops use them as
// an array; otherwise they would be in memory.
#define PEERS                                                                                                    \
  const void *p0, const void *p1, const void *p2, const void *p3, const void *p4, const void *p5, const void *p6, \
      const void *p7, const void *p8, const void *p9, const void *p10, const void *p11, const void *p12,         \
      const void *p13, const void *p14, const void *p15
#define PEER_ARRAY \
  { p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15 }

// into = the parts of all ranks, combined in rank order in fp32, rounded once; `into` may be one of them.
KERNEL(256) combine_peers(void* into, u32 type, i64 n, u32 ranks, u32 largest, PEERS) {
  const void* const peers[16] = PEER_ARRAY;
  for (i64 i = first_run(); i < n; i += next_run()) {
    int count = run_length(i, n);
    float total[8];
    load8(peers[0], type, i, count, total);
#pragma unroll
    for (u32 rank = 1; rank < 16; rank++) {
      if (rank >= ranks) continue;
      float v[8];
      load8(peers[rank], type, i, count, v);
#pragma unroll
      for (int j = 0; j < 8; j++) total[j] = largest ? fmaxf(total[j], v[j]) : total[j] + v[j];
    }
    store8(into, type, i, count, total);
  }
}

KERNEL(256) combine_peers_f64(double* into, i64 n, u32 ranks, u32 largest, PEERS) {
  const void* const peers[16] = PEER_ARRAY;
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i < n; i += (i64)gridDim.x * blockDim.x) {
    double total = ((const double*)p0)[i];
#pragma unroll
    for (u32 rank = 1; rank < 16; rank++) {
      if (rank >= ranks) continue;
      double v = ((const double*)peers[rank])[i];
      total = largest ? fmax(total, v) : total + v;
    }
    into[i] = total;
  }
}

// 1 / (1 + e^-x)

// y (rows, width) = f(gate) h(up). A row of x holds the gate's `width` elements, then those of up.
template <class F, class H>
INLINE void gated(const void* x, void* y, u32 types, i64 rows, i64 width, F f, H h) {
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    for (i64 col = 8 * threadIdx.x; col < width; col += 8 * blockDim.x) {
      int count = run_length(col, width);
      float g[8], up[8];
      load8(x, type_of(types, 0), 2 * row * width + col, count, g);
      load8(x, type_of(types, 0), (2 * row + 1) * width + col, count, up);
#pragma unroll
      for (int j = 0; j < 8; j++) g[j] = f(g[j]) * h(up[j]);
      store8(y, type_of(types, 1), row * width + col, count, g);
    }
  }
}

// Replaces x of `gated` by its gradient: (d h(up) f'(gate), d f(gate) h'(up)). f(gate, slope) returns f and sets f', as h does.
template <class F, class H>
INLINE void gated_backward(void* x, const void* d_y, u32 types, i64 rows, i64 width, F f, H h) {
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    for (i64 col = 8 * threadIdx.x; col < width; col += 8 * blockDim.x) {
      int count = run_length(col, width);
      i64 gate = 2 * row * width + col;
      float g[8], up[8], d[8];
      load8(x, type_of(types, 0), gate, count, g);
      load8(x, type_of(types, 0), gate + width, count, up);
      load8(d_y, type_of(types, 1), row * width + col, count, d);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float slope, moves, value = f(g[j], slope), factor = h(up[j], moves), d_gate = d[j] * factor * slope;
        up[j] = d[j] * value * moves;
        g[j] = d_gate;
      }
      store8(x, type_of(types, 0), gate, count, g);
      store8(x, type_of(types, 0), gate + width, count, up);
    }
  }
}

INLINE float itself(float x) { return x; }
INLINE float itself_with_slope(float x, float& slope) {
  slope = 1.0f;
  return x;
}

KERNEL(256) swiglu(const void* x, void* y, u32 types, i64 rows, i64 width) {
  gated(x, y, types, rows, width, [](float g) { return g * sigmoid(g); }, itself);
}

KERNEL(256) swiglu_backward(void* x, const void* d_y, u32 types, i64 rows, i64 width) {
  gated_backward(x, d_y, types, rows, width, [](float g, float& slope) {
    float s = sigmoid(g);
    slope = fmaf(g * (1.0f - s), s, s);
    return g * s;
  }, itself_with_slope);
}

// x, or the limit if x is larger; NaN stays NaN.
INLINE float at_most(float x, float limit) { return x > limit ? limit : x; }
// x, or the nearer end of -limit to limit if x is outside; NaN stays NaN.
INLINE float within(float x, float limit) { return x < -limit ? -limit : at_most(x, limit); }

KERNEL(256) clamped_swiglu(const void* x, void* y, u32 types, i64 rows, i64 width, float rate, float limit) {
  gated(x, y, types, rows, width, [=](float g) {
    g = at_most(g, limit);
    return g * sigmoid(rate * g);
  }, [=](float up) { return within(up, limit) + 1.0f; });
}

KERNEL(256) clamped_swiglu_backward(void* x, const void* d_y, u32 types, i64 rows, i64 width, float rate, float limit) {
  gated_backward(x, d_y, types, rows, width, [=](float z, float& slope) {
    float g = at_most(z, limit), s = sigmoid(rate * g);
    slope = z <= limit ? fmaf(rate * g * (1.0f - s), s, s) : 0.0f;
    return g * s;
  }, [=](float up, float& slope) {
    slope = up <= limit && up >= -limit ? 1.0f : 0.0f;
    return within(up, limit) + 1.0f;
  });
}

KERNEL(256) geglu(const void* x, void* y, u32 types, i64 rows, i64 width) {
  gated(x, y, types, rows, width, [](float g) { return gelu_of(g); }, itself);
}

KERNEL(256) geglu_backward(void* x, const void* d_y, u32 types, i64 rows, i64 width) {
  gated_backward(x, d_y, types, rows, width, [](float g, float& slope) {
    slope = gelu_slope(g);
    return gelu_of(g);
  }, itself_with_slope);
}
