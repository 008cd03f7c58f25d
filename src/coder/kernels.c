/* The inner loops, compiled for every processor of the platform, and for those with AVX2 and BMI2. */
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

#define KERNELS                                                                                              \
    {FUNCTION(split), FUNCTION(merge), FUNCTION(histogram), FUNCTION(encode_stream), FUNCTION(decode_streams)}

#define FUNCTION(name) plain_##name
#include "kernels.h"
#include "pairs.h"
const struct kernels plain_kernels = KERNELS;

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
#else
#pragma GCC pop_options
#endif
const struct kernels avx2_kernels = KERNELS;
#endif
