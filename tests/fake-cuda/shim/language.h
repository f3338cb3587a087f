// What CUDA C has and C++ has not, for kernels compiled as C++. Threads of a block are fibers (emulator.cpp): each runs
// to its next barrier before another goes on, which shows a missing barrier as a wrong result.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define ONEBOX_EMULATED 1
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local

namespace emulator {

struct Dim3 {
  unsigned x, y, z;
};

// The thread that runs now.
struct Current {
  Dim3 thread, block, grid;
  unsigned block_size;
  unsigned parity;  // of its warp operations
  unsigned char* dynamic_shared;
};

constexpr unsigned MOST_THREADS = 1024;
// Bytes of the stack of a thread: an odd number of cache lines. With a power of two, the tops of all stacks would compete
// for the same few places of each cache, and each switch to another thread would wait for memory.
constexpr size_t STACK = 1807 * 64;
// All stacks of a scheduler lie in one region of this size, at a multiple of it. The region begins with the address of the
// state. So the state is found without a call, which a variable of a thread of the process costs in a library that is
// opened late.
constexpr size_t REGION = size_t{1} << 27;
constexpr size_t REGION_HEAD = 64;
static_assert(REGION_HEAD + STACK * MOST_THREADS <= REGION, "room for all stacks");
inline Current& current() {
  return **reinterpret_cast<Current**>(reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) & ~(REGION - 1));
}

void block_barrier();
void warp_barrier();
// Through which the lanes of this warp hand values over in a warp operation: 32 places of PLACE bytes.
constexpr size_t PLACE = 48;
unsigned char* exchange(unsigned parity);

// Every lane gives `value`; the result says what a lane gave, until the warp operation after the next.
template <class T>
auto hand_over(const T& value) {
  static_assert(sizeof(T) <= PLACE, "room for an exchange");
  unsigned char* places = exchange(current().parity ^= 1);
  memcpy(places + current().thread.x % 32 * PLACE, &value, sizeof(T));
  warp_barrier();
  return [places](unsigned lane) -> const T& { return *reinterpret_cast<const T*>(places + lane % 32 * PLACE); };
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives row l % 8 of matrix l / 8. Of each a lane gets elements
// (l / 4, 2 (l % 4)) and the next of the row, or, transposed, of the column.
inline void ldmatrix(uint32_t (&x)[4], const uint16_t* row, bool transposed) {
  unsigned lane = current().thread.x % 32, outer = lane / 4, inner = lane % 4 * 2;
  auto rows = hand_over(row);
  for (unsigned i = 0; i < 4; i++) {
    const uint16_t* low = rows(8 * i + (transposed ? inner : outer));
    const uint16_t* high = rows(8 * i + (transposed ? inner + 1 : outer));
    x[i] = low[transposed ? outer : inner] | uint32_t{high[transposed ? outer : inner + 1]} << 16;
  }
}

// The two 16-bit elements of each word, as fp32. A lane converts its own share: that is one conversion for each element,
// not one for each product.
template <size_t WORDS, class F>
void widen_words(float (&to)[2 * WORDS], const uint32_t (&words)[WORDS], F widen) {
  for (size_t i = 0; i < WORDS; i++) {
    to[2 * i] = widen(static_cast<uint16_t>(words[i]));
    to[2 * i + 1] = widen(static_cast<uint16_t>(words[i] >> 16));
  }
}

// d (16, 8) += a (16, 16) b (16, 8), with the lanes' shares that mma.m16n8k16 has.
template <class F>
void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, F widen) {
  struct Share {
    float a[8], b[4];
  };
  unsigned lane = current().thread.x % 32;
  Share own;
  widen_words(own.a, a, widen);
  const uint32_t b[2] = {b0, b1};
  widen_words(own.b, b, widen);
  auto shares = hand_over(own);
  for (unsigned pair = 0; pair < 8; pair++) {  // of k
    const float* upper = shares(lane / 4 * 4 + pair % 4).a + pair / 4 * 4;  // two of row lane / 4, two of row lane / 4 + 8
    const float* left = shares(lane % 4 * 8 + pair % 4).b + pair / 4 * 2;
    const float* right = shares(lane % 4 * 8 + 4 + pair % 4).b + pair / 4 * 2;
    for (unsigned k = 0; k < 2; k++) {
      d[0] += upper[k] * left[k];
      d[1] += upper[k] * right[k];
      d[2] += upper[2 + k] * left[k];
      d[3] += upper[2 + k] * right[k];
    }
  }
}

// left, right (16, 8 each) += a (16, 4) b (4, 16), with the lanes' shares of four m8n8k4, one for each group of lanes
// l / 4 % 4. Of eight rows (or columns), lanes below 16 have the first four. ROWS: a lane has a row of b, else a column.
template <class F>
void mma_884(float (&left)[4], float (&right)[4], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1, bool rows, F widen) {
  struct Share {
    float a[4], b[4];
  };
  unsigned lane = current().thread.x % 32, group = lane & 12;
  Share own;
  const uint32_t a[2] = {a0, a1}, b[2] = {b0, b1};
  widen_words(own.a, a, widen);
  widen_words(own.b, b, widen);
  auto shares = hand_over(own);
  for (unsigned i = 0; i < 8; i++) {
    unsigned row = (lane & 1) + (i & 2) + (lane & 16) / 4, col = (lane & 2) + (i & 1) + (i & 4);
    float& d = i < 4 ? left[i] : right[i - 4];
    const Share& of_row = shares(group + row % 4 + row / 4 * 16);
    for (unsigned k = 0; k < 4; k++) {
      float y = rows ? shares(group + k + col / 4 * 16).b[col % 4] : shares(group + col % 4 + col / 4 * 16).b[k];
      d += of_row.a[k] * y;
    }
  }
}

struct Kernel {
  const char* name;
  unsigned most_threads;
  unsigned parameters;
  const uint32_t* sizes;  // of the parameters
  void (*call)(void** args);
};

template <auto FUNCTION>
struct Entry;
template <class... A, void (*FUNCTION)(A...)>
struct Entry<FUNCTION> {
  static constexpr uint32_t sizes[] = {sizeof(A)..., 0};
  template <size_t... I>
  static void spread(void** args, std::index_sequence<I...>) {
    FUNCTION(*static_cast<std::remove_const_t<A>*>(args[I])...);
  }
  static void call(void** args) { spread(args, std::index_sequence_for<A...>{}); }
};

template <auto FUNCTION>
constexpr Kernel entry(const char* name, unsigned most_threads) {
  using E = Entry<FUNCTION>;
  return {name, most_threads, sizeof(E::sizes) / sizeof(uint32_t) - 1, E::sizes, E::call};
}

// All kernels; the end has no name. build.rs writes it.
extern const Kernel KERNELS[];

}  // namespace emulator

#define threadIdx (emulator::current().thread)
#define blockIdx (emulator::current().block)
#define gridDim (emulator::current().grid)
#define blockDim (emulator::Dim3{emulator::current().block_size, 1, 1})

inline void __syncthreads() { emulator::block_barrier(); }
inline void __syncwarp() { emulator::warp_barrier(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulator::hand_over(value)(emulator::current().thread.x ^ mask);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulator::hand_over(value)(lane);
}

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline int __float2int_rz(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.0f) return INT32_MAX;
  return x <= -2147483648.0f ? INT32_MIN : static_cast<int>(x);
}

// The same format; g++ has the other name on Arm only since version 13.
#if defined(__aarch64__)
using half_number = __fp16;
#else
using half_number = _Float16;
#endif
inline float widen_f16(unsigned short x) { return static_cast<float>(bits_as<half_number>(x)); }
inline unsigned short round_f16(float x) { return bits_as<unsigned short>(static_cast<half_number>(x)); }
