// Tiles of kernels of differences on a GPU. `finish` writes kernel values, `times` multiplies them at once by the
// columns of V, so that the tile is read once and never written back. The formulas are those of
// core/kernels/stationary.py.
//
// G (rows x columns) is the product of prepared rows, from cuBLAS: squared distances s, or, for the Gaussian kernel,
// the exponent log(scale^2) - s/2. Z and Z2 are the prepared rows [z, 1, |z|^2] (Gaussian: [z, 1, -|z|^2/2]) of `width`
// entries; they are read only if NEAR is 1, to compute small distances from differences. For the Laplace kernel there
// is no G: Z has the rows, Z2 the rows of the second side transposed.
//
// Compiled with REAL (float or double), PROFILE (one of those below), NEAR (0 or 1) and CLASSES (columns of V in one
// pass: 4, 8 or 16) defined: a variant that branches takes more registers and ten times as long to compile. Sums are
// formed in a fixed order (no atomic additions): the same call gives the same bits.

#define GAUSSIAN 0
#define MATERN_12 1
#define MATERN_32 2
#define MATERN_52 3
#define LAPLACE 4
typedef REAL R;
enum { THREADS = 128, ROWS = 8 };  // of a block; each thread computes all its rows in every THREADS-th column

__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float root_of(float x) { return sqrtf(x); }
__device__ __forceinline__ double root_of(double x) { return sqrt(x); }

struct Tile {
    const R *G, *Z, *Z2;
    long long stride;  // from one row of G to the next
    int rows, columns, width;
    R variance, top;  // scale^2 and its logarithm

    __device__ __forceinline__ R product(int i, int j) const { return PROFILE == LAPLACE ? R(0) : G[i * stride + j]; }

    // s, computed from differences where it is much smaller than |z|^2 + |z'|^2
    __device__ __noinline__ R exact_where_near(R s, int i, int j) const {
        const R *z = Z + (long long)i * width, *z2 = Z2 + (long long)j * width;
        const R norms = (z[width - 1] + z2[width - 1]) * (PROFILE == GAUSSIAN ? R(-2) : R(1));
        if (!(s < norms * R(0.0078125))) return s;  // _NEAR
        R sum = 0;
#pragma unroll 1
        for (int k = 0; k < width - 2; k++) sum += (z[k] - z2[k]) * (z[k] - z2[k]);
        return sum;
    }

    __device__ R city_block(int i, int j) const {
        R sum = 0;
#pragma unroll 4
        for (int k = 0; k < width; k++) {
            const R difference = Z[(long long)i * width + k] - Z2[(long long)k * columns + j];
            sum += difference < 0 ? -difference : difference;
        }
        return sum;
    }

    // The kernel value for entry g of G. Comparisons are such that NaN stays NaN.
    __device__ R value(R g, int i, int j) const {
        R k;
        if (PROFILE == GAUSSIAN) {
            k = exp_of(NEAR ? top - R(0.5) * exact_where_near(2 * (top - g), i, j) : g);
        } else if (PROFILE == LAPLACE) {
            k = variance * exp_of(-city_block(i, j));
        } else {
            const R clamped = g < 0 ? R(0) : g;
            const R s = NEAR ? exact_where_near(clamped, i, j) : clamped;
            const R a = root_of((PROFILE == MATERN_12 ? R(1) : PROFILE == MATERN_32 ? R(3) : R(5)) * s);
            const R polynomial = PROFILE == MATERN_12 ? R(1) : PROFILE == MATERN_32 ? 1 + a : 1 + a + a * a / 3;
            k = variance * (polynomial * exp_of(-a));
        }
        return k > variance ? variance : k;
    }
};

// out = the tile; out may be G itself
__device__ void finish_tile(const Tile &tile, R *out, long long out_stride) {
    const int first = blockIdx.x * ROWS, j = blockIdx.y * THREADS + threadIdx.x;
    if (j >= tile.columns) return;
    R g[ROWS];  // all loads before the first store: they overlap in time
#pragma unroll
    for (int r = 0; r < ROWS; r++) g[r] = first + r < tile.rows ? tile.product(first + r, j) : R(0);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (first + r < tile.rows) out[(first + r) * out_stride + j] = tile.value(g[r], first + r, j);
}

// out += tile V for CLASSES columns of V, which is stored by columns
__device__ void times_tile(const Tile &tile, R *out, long long out_stride, const R *V, int classes) {
    enum { OWN = CLASSES > 8 ? ROWS / 2 : ROWS, PARTS = THREADS / CLASSES };
    __shared__ R partial[CLASSES * THREADS];
    __shared__ R parts[THREADS];
    const int first = blockIdx.x * OWN, first_class = blockIdx.y * CLASSES, t = threadIdx.x;
    R sum[OWN][CLASSES] = {};
    for (int j = t; j < tile.columns; j += THREADS) {
        R g[OWN], v[CLASSES];
#pragma unroll
        for (int r = 0; r < OWN; r++) g[r] = first + r < tile.rows ? tile.product(first + r, j) : R(0);
#pragma unroll
        for (int c = 0; c < CLASSES; c++)
            v[c] = first_class + c < classes ? V[(long long)(first_class + c) * tile.columns + j] : R(0);
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            if (first + r >= tile.rows) break;
            const R k = tile.value(g[r], first + r, j);
#pragma unroll
            for (int c = 0; c < CLASSES; c++) sum[r][c] += k * v[c];
        }
    }
#pragma unroll
    for (int r = 0; r < OWN; r++) {
#pragma unroll
        for (int c = 0; c < CLASSES; c++) partial[c * THREADS + t] = sum[r][c];
        __syncthreads();
        R part = 0;  // thread t adds up one of the PARTS of class t / PARTS
        for (int k = t % PARTS; k < THREADS; k += PARTS) part += partial[t / PARTS * THREADS + k];
        parts[t] = part;
        __syncthreads();
        if (t < CLASSES && first_class + t < classes && first + r < tile.rows) {
            R total = 0;
            for (int k = 0; k < PARTS; k++) total += parts[t * PARTS + k];
            out[(first + r) * out_stride + first_class + t] += total;
        }
    }
}

#define ARGUMENTS                                                                                                     \
    const R *G, long long stride, R *out, long long out_stride, const R *V, const R *Z, const R *Z2, int rows,         \
        int columns, int classes, int width, double variance, double top
#define TILE {G, Z, Z2, stride, rows, columns, width, R(variance), R(top)}
#define ENTRY extern "C" __global__ void __launch_bounds__(THREADS)

ENTRY finish(ARGUMENTS) { finish_tile(TILE, out, out_stride); }
ENTRY times(ARGUMENTS) { times_tile(TILE, out, out_stride, V, classes); }
