/* Code and decode the same data with the inner loops of every kind of processor; print a hash of what was written.

   It has no Python, so that it can be compiled for another architecture and run in an emulator. */
#include <stdio.h>
#include <stdlib.h>

#include "coder.h"

#define ELEMENTS 300001
#define BYTES (ELEMENTS * MAX_WIDTH)

static const size_t SIZES[] = {0, 1, 2, 3, 255, 256, 257, 1023, 1024, 16383, 16384, 65535, 65536, 131071, 131072, 131073,
                               262143, 262144, 262145, ELEMENTS};
enum { NOISE, CONSTANT, TWO, GEOMETRIC, RAMP, DISTRIBUTIONS };

static uint8_t data[BYTES], planes[BYTES], merged[BYTES], coded[BYTES], decoded[BYTES];

static uint64_t state;

static uint64_t random64(void) { /* xorshift64 */
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static uint8_t draw(int distribution, size_t i) {
    uint64_t value = random64();
    switch (distribution) {
    case CONSTANT: return 7;
    case TWO: return (uint8_t)(value & 1);
    /* Each value is half as frequent as the one before, as the exponents of weights are. */
    case GEOMETRIC: return (uint8_t)(120 - __builtin_ctzll(value | 1ull << 40));
    case RAMP: return (uint8_t)(i * 256 / ELEMENTS);
    default: return (uint8_t)value;
    }
}

static uint64_t hash(uint64_t seed, const uint8_t *bytes, size_t count) { /* FNV-1a */
    for (size_t i = 0; i < count; i++) seed = (seed ^ bytes[i]) * 1099511628211u;
    return seed;
}

static void expect(int passed, const char *what, size_t count, int variant) {
    if (passed) return;
    fprintf(stderr, "%s failed for %zu elements, variant %d\n", what, count, variant);
    exit(1);
}

static uint64_t check_planes(const struct kernels *kernels, size_t count, uint64_t seed) {
    for (int width = 1; width <= MAX_WIDTH; width *= 2) {
        for (int layout = LAYOUT_BYTES; layout <= (width > 1 ? LAYOUT_EXPONENT : LAYOUT_BYTES); layout++) {
            uint8_t *starts[MAX_WIDTH];
            size_t size = count * (size_t)width;
            for (int k = 0; k < width; k++) starts[k] = planes + (size_t)k * count;
            kernels->split(data, count, width, (enum layout)layout, starts);
            kernels->merge((const uint8_t *const *)starts, count, width, (enum layout)layout, merged);
            expect(memcmp(data, merged, size) == 0, "splitting and merging", count, 10 * width + layout);
            seed = hash(seed, planes, size);
        }
    }
    return seed;
}

static uint64_t check_frames(const struct kernels *kernels, size_t count, uint64_t seed) {
    static struct encoder encoder;
    static struct decoder decoder;
    for (int distribution = NOISE; distribution < DISTRIBUTIONS; distribution++) {
        reset_encoder(&encoder);
        for (int frame = 0; frame < 2; frame++) { /* the second may use the code of the first */
            for (size_t i = 0; i < count; i++) data[i] = draw(distribution, i);
            size_t size = encode_frame(kernels, &encoder, data, count, coded, coded + frame_bound(count));
            expect(size <= frame_bound(count), "coding", count, distribution);
            int done = decode_frame(kernels, &decoder, coded, size, decoded, count);
            expect(done && memcmp(data, decoded, count) == 0, "decoding", count, distribution);
            expect(!decode_frame(kernels, &decoder, coded, size - 1, decoded, count), "refusing a truncated frame",
                   count, distribution);
            seed = hash(seed, coded, size);
        }
    }
    return seed;
}

static void check(const char *name, const struct kernels *kernels) {
    uint64_t seed = 14695981039346656037u;
    state = 88172645463325252u;
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        for (size_t at = 0; at < SIZES[i] * MAX_WIDTH; at++) data[at] = (uint8_t)(at * 2654435761u >> 24);
        seed = check_planes(kernels, SIZES[i], seed);
        seed = check_frames(kernels, SIZES[i], seed);
    }
    printf("%s %016llx\n", name, (unsigned long long)seed);
}

int main(void) {
    const struct kernels *kinds[MAX_KINDS];
    int count = find_kernels(kinds);
    for (int i = 0; i < count; i++) check(kinds[i]->name, kinds[i]);
    return 0;
}
