// Runs CUDA kernels on the host, block after block: enough of the language for kme_dist/tiles.cu.
// The threads of a block are fibres that take turns from one __syncthreads() to the next, thread 0 first. A barrier
// that some threads skip is reported; one that is missing changes results, since no thread waits for a later one.
#include <cmath>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(threads)
#define __shared__ static  // one block at a time

struct Index {
    int x, y;
};
static Index threadIdx, blockIdx;

static std::vector<ucontext_t> fibres;
static std::vector<char> finished;
static ucontext_t scheduler;

static void __syncthreads() { swapcontext(&fibres[threadIdx.x], &scheduler); }

static void run_thread();

static void fibre() {
    run_thread();
    finished[threadIdx.x] = 1;
}

static bool run_block(int threads, std::vector<std::vector<char>> &stacks) {
    finished.assign(threads, 0);
    for (int t = 0; t < threads; t++) {
        getcontext(&fibres[t]);
        fibres[t].uc_stack.ss_sp = stacks[t].data();
        fibres[t].uc_stack.ss_size = stacks[t].size();
        fibres[t].uc_link = &scheduler;
        makecontext(&fibres[t], fibre, 0);
    }
    for (;;) {
        int ended = 0;
        for (int t = 0; t < threads; t++) {
            threadIdx.x = t;
            swapcontext(&scheduler, &fibres[t]);
            ended += finished[t];
        }
        if (ended) return ended == threads;
    }
}

typedef void (*Kernel)(const void *, long long, void *, long long, const void *, const void *, const void *, int, int,
                       int, int, double, double);
static struct {
    Kernel kernel;
    const void *G;
    long long stride;
    void *out;
    long long out_stride;
    const void *V, *Z, *Z2;
    int rows, columns, classes, width;
    double variance, top;
} call;

static void run_thread() {
    call.kernel(call.G, call.stride, call.out, call.out_stride, call.V, call.Z, call.Z2, call.rows, call.columns,
                call.classes, call.width, call.variance, call.top);
}

// 0, or 1 if the threads of a block did not all reach the same barriers
extern "C" int launch(Kernel kernel, int grid_x, int grid_y, int threads, const void *G, long long stride, void *out,
                      long long out_stride, const void *V, const void *Z, const void *Z2, int rows, int columns,
                      int classes, int width, double variance, double top) {
    std::vector<std::vector<char>> stacks(threads, std::vector<char>(1 << 16));
    fibres.resize(threads);
    call = {kernel, G, stride, out, out_stride, V, Z, Z2, rows, columns, classes, width, variance, top};
    for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++)
            if (!run_block(threads, stacks)) return 1;
    return 0;
}
