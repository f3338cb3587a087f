// Runs kernels on the calling thread, block after block. A fiber runs threads one after another until one of them waits
// at a barrier; then another fiber goes on with the next. So kernels without barriers run in a plain loop. Threads of a
// warp follow one another directly; the scheduler only starts each round of a warp.
#include "language.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sys/mman.h>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

namespace {

#if defined(__x86_64__)

extern "C" void onebox_emulator_switch(void** save, void* load);
asm(R"(
.text
.p2align 4
.local onebox_emulator_switch
onebox_emulator_switch:
  pushq %r15
  pushq %r14
  pushq %r13
  pushq %r12
  pushq %rbx
  pushq %rbp
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %rbp
  popq %rbx
  popq %r12
  popq %r13
  popq %r14
  popq %r15
  ret
)");

struct Context {
  void* stack_pointer = nullptr;

  // The first switch to it enters `main` on `stack`.
  void prepare(unsigned char* stack, void (*main)()) {
    auto top = reinterpret_cast<void**>(stack + STACK);
    *--top = nullptr;  // keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(main);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    stack_pointer = top;
  }
  void switch_to(Context& other) { onebox_emulator_switch(&stack_pointer, other.stack_pointer); }
};

#else

struct Context {
  ucontext_t context;

  void prepare(unsigned char* stack, void (*main)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, main, 0);
  }
  void switch_to(Context& other) { swapcontext(&context, &other.context); }
};

#endif

enum class State : unsigned char { Fresh, Ready, AtWarp, AtBlock, Done };

struct Thread {
  State state;
  unsigned fiber;
  unsigned parity;
};

// What one thread of the process needs to run blocks.
struct Scheduler : Current {
  Context home;
  std::vector<Context> fibers;
  std::vector<unsigned> free_fibers;
  unsigned char* region = nullptr;  // of all stacks
  Thread threads[MOST_THREADS];
  unsigned count = 0;    // of the block
  unsigned running = 0;  // thread
  unsigned fiber = 0;    // that runs it
  unsigned next = 0;     // the first fresh thread; all before are started
  const Kernel* kernel = nullptr;
  void** args = nullptr;
  std::vector<unsigned char> places, shared_bytes;

  ~Scheduler();

  unsigned char* stack(unsigned number) { return region + REGION_HEAD + STACK * number; }
  unsigned take_fiber();
  void start(unsigned number);
  void wait(State at);
  bool go_on(unsigned number, Context& from);
  bool run_warp(unsigned first, unsigned end);
  bool run_block();
  bool fail(const char* problem);
};

thread_local std::unique_ptr<Scheduler> scheduler;

// That of the fiber that calls.
Scheduler& mine() { return static_cast<Scheduler&>(current()); }

// A fiber's life: fresh threads in order, as long as there are any.
void fiber_main() {
  Scheduler& s = mine();
  for (;;) {
    while (s.next < s.count) {
      s.start(s.next++);
      s.kernel->call(s.args);
      s.threads[s.running].state = State::Done;
    }
    unsigned number = s.fiber;
    s.free_fibers.push_back(number);
    s.fibers[number].switch_to(s.home);
  }
}

void Scheduler::start(unsigned number) {
  threads[number] = {State::Ready, fiber, 0};
  running = number;
  thread = {number, 0, 0};
  parity = 0;
}

// New memory for stacks, which begins at a multiple of its size.
unsigned char* map_region() {
  void* memory = mmap(nullptr, 2 * REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  auto begin = static_cast<unsigned char*>(memory);
  size_t before = -reinterpret_cast<uintptr_t>(begin) & (REGION - 1);
  if (before > 0) munmap(begin, before);
  munmap(begin + before + REGION, REGION - before);
  return begin + before;
}

// The lowest word of a stack is zero until a thread uses the whole stack.
Scheduler::~Scheduler() {
  for (unsigned number = 0; number < fibers.size(); number++) {
    uint64_t lowest;
    memcpy(&lowest, stack(number), sizeof(lowest));
    if (lowest != 0) {
      fprintf(stderr, "emulated kernels: a thread has used the whole stack of %zu bytes\n", STACK);
      abort();
    }
  }
  if (region) munmap(region, REGION);
}

unsigned Scheduler::take_fiber() {
  if (free_fibers.empty()) {
    unsigned number = fibers.size();
    if (!region) {
      region = map_region();
      *reinterpret_cast<Current**>(region) = this;
      fibers.reserve(MOST_THREADS);  // contexts stay where they are
    }
    fibers.emplace_back();
    fibers[number].prepare(stack(number), fiber_main);
    return number;
  }
  unsigned number = free_fibers.back();
  free_fibers.pop_back();
  return number;
}

// Goes on with the next thread of the warp, or with the scheduler after the last one.
void Scheduler::wait(State at) {
  threads[running].state = at;
  threads[running].parity = parity;
  unsigned following = running + 1;
  Context& own = fibers[fiber];
  if (following % 32 == 0 || !go_on(following, own)) own.switch_to(home);
}

// Leaves `from` for a thread that is fresh or ready; returns false at once if it is neither.
bool Scheduler::go_on(unsigned number, Context& from) {
  if (number == next) {
    fiber = take_fiber();
  } else if (threads[number].state == State::Ready) {
    running = number;
    fiber = threads[number].fiber;
    thread = {number, 0, 0};
    parity = threads[number].parity;
  } else {
    return false;
  }
  from.switch_to(fibers[fiber]);
  return true;
}

bool Scheduler::fail(const char* problem) {
  fprintf(stderr, "emulated kernel %s: %s in block (%u, %u, %u)\n", kernel->name, problem, block.x, block.y,
          block.z);
  return false;
}

// Until every thread of the warp waits at a block barrier or is done.
bool Scheduler::run_warp(unsigned first, unsigned end) {
  for (;;) {
    unsigned at_warp = 0, at_block = 0;
    for (unsigned i = first; i < end; i++) go_on(i, home);
    for (unsigned i = first; i < end; i++) {
      at_warp += threads[i].state == State::AtWarp;
      at_block += threads[i].state == State::AtBlock;
    }
    if (at_warp == 0) {
      bool all = at_block == 0 || at_block == end - first;
      return all || fail("some threads of a warp ended before a block barrier");
    }
    if (at_warp != end - first) return fail("some threads of a warp are absent from a warp operation");
    for (unsigned i = first; i < end; i++) threads[i].state = State::Ready;
  }
}

bool Scheduler::run_block() {
  next = 0;
  for (unsigned i = 0; i < count; i++) threads[i].state = State::Fresh;
  for (;;) {
    for (unsigned first = 0; first < count; first += 32)
      if (!run_warp(first, first + 32 < count ? first + 32 : count)) return false;
    unsigned waiting = 0;
    for (unsigned i = 0; i < count; i++) waiting += threads[i].state == State::AtBlock;
    if (waiting == 0) return true;
    if (waiting != count) return fail("some warps ended before a block barrier");
    for (unsigned i = 0; i < count; i++) threads[i].state = State::Ready;
  }
}

const Kernel* find(const char* name) {
  for (const Kernel* kernel = KERNELS; kernel->name; kernel++)
    if (strcmp(kernel->name, name) == 0) return kernel;
  return nullptr;
}

bool run_grid(Scheduler& s, const uint32_t grid[3], uint32_t shared_bytes) {
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) {
        s.block = {x, y, z};
        s.shared_bytes.assign(shared_bytes + 16, 0xff);  // NaN
        auto at = reinterpret_cast<uintptr_t>(s.shared_bytes.data());
        s.dynamic_shared = reinterpret_cast<unsigned char*>((at + 15) & ~uintptr_t{15});
        if (!s.run_block()) return false;
      }
  return true;
}

}  // namespace

void block_barrier() { mine().wait(State::AtBlock); }
void warp_barrier() { mine().wait(State::AtWarp); }
unsigned char* exchange(unsigned parity) {
  Scheduler& s = mine();
  return &s.places[(s.running / 32 * 2 + parity) * 32 * PLACE];
}

}  // namespace emulator

// How many parameters a kernel has, and in `sizes` (if not null) their bytes; -1 if there is no such kernel.
extern "C" int onebox_emulated_parameters(const char* name, const uint32_t** sizes) {
  const emulator::Kernel* kernel = emulator::find(name);
  if (!kernel) return -1;
  if (sizes) *sizes = kernel->sizes;
  return static_cast<int>(kernel->parameters);
}

// Runs a kernel to its end. 0; 1 if there is no such kernel; 2 if the launch asks for what no GPU has; 3 if threads part
// at a barrier (told on stderr).
extern "C" int onebox_emulated_launch(const char* name, const uint32_t grid[3], uint32_t block, uint32_t shared_bytes,
                                      void** args) {
  using namespace emulator;
  const Kernel* kernel = find(name);
  if (!kernel) return 1;
  bool fits = block > 0 && block <= kernel->most_threads && block % 32 == 0 && shared_bytes <= 227 * 1024;
  if (!fits || grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[1] > 65535 || grid[2] > 65535) return 2;
  if (!scheduler) scheduler = std::make_unique<Scheduler>();
  Scheduler& s = *scheduler;
  s.kernel = kernel;
  s.args = args;
  s.count = block;
  s.places.assign(block / 32 * 2 * 32 * PLACE, 0);
  s.grid = {grid[0], grid[1], grid[2]};
  s.block_size = block;
  if (run_grid(s, grid, shared_bytes)) return 0;
  scheduler.reset();  // some fibers stand in the middle of a kernel
  return 3;
}
