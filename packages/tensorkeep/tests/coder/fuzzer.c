/* A fuzzer of the coder, for a build with AddressSanitizer: every buffer has its exact size, so that the first byte
   outside it is reported.

       fuzzer SECONDS SEED    run cases from a seed on for so long (0: only that of the seed)

   A case uses one encoder and one decoder for each kind of instructions over several frames: data are coded, decoded
   and compared; then the frames are damaged, and frames of consistent sizes with a wrong content are made. These must
   decode to the same or be refused by both, and may not change how the next good frame decodes. The cases run in a
   child process, so that the parent can report the seed of the case that ended it. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../src/coder/coder.h"

#define LARGEST 700000
#define FRAMES 4
#define DAMAGES 24

static const struct kernels *kinds[MAX_KINDS];
static int kind_count;

static struct progress {
    uint64_t seed, cases, round_trips, damaged, accepted;
} *progress;

/* --- random choices ------------------------------------------------------------------------------------------------ */

static uint64_t state;

static uint64_t any(void) { /* splitmix64 */
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static size_t below(size_t limit) { return (size_t)(any() % limit); }

/* Sizes of every magnitude, and those around a power of two and the limits of the format. */
static size_t any_size(void) {
    static const size_t edges[] = {0, 6, 256, 1024, 16384, 65536, 65536 + 256, MAX_BLOCK, 2 * MAX_BLOCK, 3 * MAX_BLOCK};
    size_t magnitude = (size_t)1 << below(below(8) ? 15 : 19);
    size_t size = below(2) ? below(magnitude) : edges[below(sizeof edges / sizeof *edges)] + below(5);
    return size < 2 || below(4) ? size : size - 2;
}

static uint8_t any_extreme(void) {
    static const uint8_t extremes[] = {0, 1, 0x7F, 0x80, 0xFE, 0xFF};
    return below(2) ? extremes[below(sizeof extremes)] : (uint8_t)any();
}

/* --- data ---------------------------------------------------------------------------------------------------------- */

/* Symbols from 0 on of which each is less frequent than the one before, by a ratio of `percent`. */
static size_t geometric(size_t percent, size_t symbols) {
    size_t symbol = 0;
    while (symbol + 1 < symbols && below(100) < percent) symbol++;
    return symbol;
}

static void fill(uint8_t *data, size_t count) {
    size_t kind = below(8), symbols = 1 + below(below(2) ? 256 : 12), period = 1 + below(20000), percent = 30 + below(70);
    uint8_t first = (uint8_t)any(), second = (uint8_t)any();
    for (size_t i = 0; i < count; i++) {
        uint8_t base = kind == 5 && i >= count / 2 ? second : first;
        size_t symbol = kind == 0                  ? below(symbols)
                        : kind == 1                ? i * symbols / count /* sorted */
                        : kind == 2 && i >= period ? (size_t)(uint8_t)(data[i - period] - base)
                        : kind == 3                ? (below(50) ? 0 : below(symbols)) /* sparse */
                        : kind == 4                ? below(below(4) ? 256 : 128)      /* shrinks too little */
                        : kind == 6                ? (below(3) ? below(symbols) : 0)  /* long codes of high values */
                                                   : geometric(percent, symbols);
        data[i] = (uint8_t)(base + symbol);
    }
    for (size_t rare = below(3); rare && count; rare--) data[below(2) ? count - 1 : below(count)] = (uint8_t)any();
}

/* --- checks -------------------------------------------------------------------------------------------------------- */

static void *allocate(size_t size) {
    void *memory = malloc(size ? size : 1);
    if (!memory) abort();
    return memory;
}

/* Return a copy of which every byte outside is reported. */
static uint8_t *exact(const uint8_t *data, size_t size) { return memcpy(allocate(size), data, size); }

static void require(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "fuzzer: %s\n", what);
    abort();
}

/* Decode with each kind of instructions; return whether the frame was accepted, and compare with `expected` if any. */
static int decode(struct decoder *decoders[MAX_KINDS], const uint8_t *frame, size_t size, size_t count,
                  const uint8_t *expected) {
    uint8_t *outs[MAX_KINDS];
    int accepted[MAX_KINDS];
    for (int k = 0; k < kind_count; k++) {
        outs[k] = allocate(count);
        accepted[k] = decode_frame(kinds[k], decoders[k], frame, size, outs[k], count);
        require(accepted[k] == 0 || accepted[k] == 1, "a result that is neither 0 nor 1");
        if (expected) require(accepted[k] && memcmp(outs[k], expected, count) == 0, "decodes to other bytes");
    }
    for (int k = 1; k < kind_count; k++) {
        require(accepted[0] == accepted[k], "one kind of instructions refuses a frame that the other accepts");
        if (accepted[0]) require(memcmp(outs[0], outs[k], count) == 0, "instructions decode to different bytes");
    }
    for (int k = 0; k < kind_count; k++) free(outs[k]);
    return accepted[0];
}

/* Encode with each kind of instructions to memory of the bound or a little more; return the frame, which both agree on. */
static uint8_t *encode(struct encoder *encoders[MAX_KINDS], const uint8_t *data, size_t count, size_t *size) {
    uint8_t *frames[MAX_KINDS];
    size_t sizes[MAX_KINDS], first = below(3) == 0, space = frame_bound(count) + (below(2) ? below(2 * STREAM_CAPACITY) : 0);
    for (int k = 0; k < kind_count; k++) {
        uint8_t *out = allocate(space);
        if (first) reset_encoder(encoders[k]);
        sizes[k] = encode_frame(kinds[k], encoders[k], data, count, out, out + space);
        require(sizes[k] <= frame_bound(count), "a frame exceeds its bound");
        frames[k] = exact(out, sizes[k]);
        free(out);
    }
    for (int k = 1; k < kind_count; k++) {
        require(sizes[0] == sizes[k] && memcmp(frames[0], frames[k], sizes[0]) == 0, "instructions write different frames");
        free(frames[k]);
    }
    *size = sizes[0];
    return frames[0];
}

static void split_and_merge(void) {
    int width = 1 << below(4);
    enum layout layout = width > 1 && below(2) ? LAYOUT_EXPONENT : LAYOUT_BYTES;
    size_t count = below(1 + below(5000)), offset = below(8), bytes = count * (size_t)width;
    uint8_t *memory = allocate(offset + bytes), *planes[MAX_KINDS][MAX_WIDTH];
    for (size_t i = 0; i < offset + bytes; i++) memory[i] = (uint8_t)any();
    for (int k = 0; k < kind_count; k++) {
        for (int p = 0; p < width; p++) planes[k][p] = allocate(count);
        kinds[k]->split(memory + offset, count, width, layout, planes[k]);
    }
    for (int k = 0; k < kind_count; k++) {
        uint8_t *back = allocate(bytes);
        kinds[k]->merge((const uint8_t *const *)planes[k], count, width, layout, back);
        require(memcmp(back, memory + offset, bytes) == 0, "merge does not invert split");
        for (int p = 0; p < width; p++) require(memcmp(planes[0][p], planes[k][p], count) == 0, "planes differ");
        free(back);
    }
    for (int k = 0; k < kind_count; k++)
        for (int p = 0; p < width; p++) free(planes[k][p]);
    free(memory);
}

/* --- damage -------------------------------------------------------------------------------------------------------- */

/* Return a damaged copy and change its size; it has space for 64 bytes more. */
static uint8_t *damage(const uint8_t *frame, size_t *size) {
    uint8_t *copy = memcpy(allocate(*size + 64), frame, *size);
    for (size_t times = 1 + below(3); times && *size; times--) {
        /* The headers, the description and the jump table are at the front. */
        size_t reach = below(4) ? (*size < 160 ? *size : below(2) ? 20 : 160) : *size;
        size_t place = below(reach < *size ? reach : *size), rest = *size - place, length = 1 + below(rest < 64 ? rest : 64);
        switch (below(8)) {
        case 0: copy[place] ^= (uint8_t)(1 << below(8)); break;
        case 1: copy[place] = any_extreme(); break;
        case 2: memset(copy + place, any_extreme(), length < 8 ? length : 8); break;
        case 3: memmove(copy + place, copy + below(*size - length + 1), length); break;
        case 4: *size = place; break;
        case 5: memmove(copy + place, copy + place + length, rest - length), *size -= length; break;
        case 6: for (; place < *size; place++) copy[place] = (uint8_t)any(); break;
        case 7:
            if (times > 1) break; /* once, as it takes the space */
            for (length = 1 + below(64); length; length--) copy[(*size)++] = any_extreme();
        }
    }
    return copy;
}

static void put(uint8_t **at, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) *(*at)++ = (uint8_t)(value >> (8 * i));
}

/* Write a description that is random but of the size that it states, or that of the encoder. */
static void put_description(uint8_t **at, const struct encoder *encoder) {
    size_t kind = below(3), size = kind == 0 ? encoder->description_size : below(128);
    if (kind == 0) {
        memcpy(*at, encoder->description, size);
        if (size && below(2)) (*at)[below(size)] = any_extreme();
        *at += size;
        return;
    }
    put(at, kind == 1 ? size : 127 + size, 1); /* an FSE stream, or four bits a weight */
    for (size_t i = 0; i < (kind == 1 ? size : (size + 1) / 2); i++) put(at, kind == 1 ? any() : any() & 0x33, 1);
}

/* Write a frame of one block of literals whose sizes agree with one another, as far as they are not chosen to lie. */
static size_t craft(const struct encoder *encoder, uint8_t *frame, size_t count) {
    uint8_t literals[1024], *at = literals;
    int format = (int)below(4), bits = format ? 6 + 4 * format : 10, treeless = below(6) == 0;
    if (!treeless) put_description(&at, encoder);
    size_t rest = below(400);
    for (int i = 0; format && i < 3; i++) put(&at, below(4) ? below(rest / 3 + 2) : any(), 2);
    for (; rest; rest--) put(&at, below(8) ? any() : 0, 1);
    if (at > literals && below(8)) at[-1] |= 1;
    size_t length = (size_t)(at - literals), header = (size_t)(4 + 2 * bits) / 8, declared = below(8) ? count : any_size();
    at = frame;
    put(&at, 0xFD2FB528u, 4);
    put(&at, 0xA0, 1);
    put(&at, count, 4);
    put(&at, (header + length + 1) << 3 | 2 << 1 | 1, 3);
    put(&at, (uint64_t)(treeless ? 3 : 2) | (uint64_t)format << 2 | (declared & ((1u << bits) - 1)) << 4 |
                 (uint64_t)(length & ((1u << bits) - 1)) << (4 + bits), header);
    memcpy(at, literals, length);
    at[length] = 0;
    return (size_t)(at - frame) + length + 1;
}

static void decode_damaged(struct decoder *decoders[MAX_KINDS], const uint8_t *frame, size_t size, size_t count) {
    uint8_t *copy = exact(frame, size);
    progress->accepted += (uint64_t)decode(decoders, copy, size, count, NULL);
    progress->damaged++;
    free(copy);
}

/* --- cases --------------------------------------------------------------------------------------------------------- */

static void run_frame(struct encoder *encoders[MAX_KINDS], struct decoder *decoders[MAX_KINDS]) {
    uint8_t *data, *frame, crafted[2048];
    size_t count = any_size(), size;
    require(count <= LARGEST, "the sizes are too large");
    fill(data = allocate(count), count);
    frame = encode(encoders, data, count, &size);
    decode(decoders, frame, size, count, data);
    progress->round_trips++;
    size_t estimate = coded_size(kinds[0], data, count);
    for (int k = 1; k < kind_count; k++)
        require(estimate == coded_size(kinds[k], data, count), "instructions estimate different sizes");
    require(estimate <= count + count / 2 + MAX_TREE, "the estimate is larger than any frame");
    for (int i = 0; i < DAMAGES; i++) {
        size_t damaged_size = size, other = below(8) ? count : any_size();
        uint8_t *damaged = damage(frame, &damaged_size);
        decode_damaged(decoders, damaged, damaged_size, other);
        free(damaged);
        other = below(2000);
        decode_damaged(decoders, crafted, craft(encoders[0], crafted, other), other);
        if (i % 8 == 7) decode(decoders, frame, size, count, data);
    }
    free(data);
    free(frame);
}

static void run_case(uint64_t seed) {
    struct encoder *encoders[MAX_KINDS];
    struct decoder *decoders[MAX_KINDS];
    progress->seed = state = seed;
    for (int k = 0; k < kind_count; k++) {
        encoders[k] = calloc(1, sizeof **encoders);
        decoders[k] = calloc(1, sizeof **decoders);
    }
    for (int i = 0; i < FRAMES; i++) run_frame(encoders, decoders);
    for (int i = 0; i < 8; i++) split_and_merge();
    for (int k = 0; k < kind_count; k++) free(encoders[k]), free(decoders[k]);
    progress->cases++;
}

int main(int arguments, char **values) {
    if (arguments != 3) return fprintf(stderr, "usage: fuzzer SECONDS SEED\n"), 2;
    time_t start = time(NULL), end = start + atol(values[1]);
    uint64_t seed = strtoull(values[2], NULL, 10);
    kind_count = find_kernels(kinds);
    progress = mmap(NULL, sizeof *progress, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child = fork();
    if (child == 0) {
        do run_case(seed++);
        while (time(NULL) < end);
        _exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    printf("fuzzer: %llu cases, %llu round trips, %llu damaged frames (%llu accepted), %lld seconds, from seed %s\n",
           (unsigned long long)progress->cases, (unsigned long long)progress->round_trips,
           (unsigned long long)progress->damaged, (unsigned long long)progress->accepted,
           (long long)(time(NULL) - start), values[2]);
    if (status == 0) return 0;
    printf("fuzzer: FAILED; `fuzzer 0 %llu` repeats it\n", (unsigned long long)progress->seed);
    return 1;
}
