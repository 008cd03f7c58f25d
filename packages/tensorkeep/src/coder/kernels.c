/* The inner loops, compiled for every processor of the platform, and for those with more instructions. */
#include "coder.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

static ALWAYS_INLINE uint64_t load64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static ALWAYS_INLINE uint16_t load16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

#define FUNCTION(name) plain_##name
#include "kernels.h"
#include "pairs.h"

static const struct kernels plain_kernels = {
    "plain", plain_split, plain_merge, plain_histogram, plain_encode_stream, plain_decode_streams,
};

#if defined(__x86_64__)
#undef FUNCTION
#define FUNCTION(name) avx2_##name
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2")
#endif
#include "kernels.h"
#include "shuffles.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,avx512f,avx512bw,avx512vbmi"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vbmi")
#endif
#include "permutes.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static const struct kernels avx2_kernels = {
    "avx2", avx2_split, avx2_merge, avx2_histogram, avx2_encode_stream, avx2_decode_streams,
};
static const struct kernels avx512_kernels = {
    "avx512", avx2_split, avx2_merge, avx2_histogram, avx512_encode_stream, avx2_decode_streams,
};
#endif

int find_kernels(const struct kernels *found[MAX_KINDS]) {
    int count = 0;
    found[count++] = &plain_kernels;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")) {
        found[count++] = &avx2_kernels;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vbmi"))
            found[count++] = &avx512_kernels;
    }
#endif
    return count;
}
