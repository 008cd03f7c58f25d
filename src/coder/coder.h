/* Types and functions that the files of the coder share. */
#ifndef TENSORKEEP_CODER_H
#define TENSORKEEP_CODER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the coder needs a little-endian processor"
#endif

/* RFC 8878, 4.2.1: a code has at most 11 bits. */
#define MAX_BITS 11
#define TABLE_SIZE (1 << MAX_BITS)
/* RFC 8878, 3.1.1.2.3: a block decodes to at most 128 KiB. */
#define MAX_BLOCK (128 * 1024)
#define SYMBOLS 256
/* From this many symbols on, zstd and we divide them into four streams. */
#define FOUR_STREAMS_FROM 256
/* The longest stream of a quarter of a block, and space for a store of eight bytes. */
#define STREAM_CAPACITY (MAX_BLOCK / 4 * MAX_BITS / 8 + 16)

#define MAX_WIDTH 8

enum layout { LAYOUT_BYTES = 0, LAYOUT_EXPONENT = 1 };

/* A Huffman code. */
struct code {
    uint16_t value[SYMBOLS];
    uint8_t bits[SYMBOLS]; /* 0 for symbols that do not occur */
    int max_bits;
};

/* What a look-up of MAX_BITS bits yields: up to four symbols from the lowest byte on, the bits that they take from bit
   32 on, their number from bit 40 on. */
typedef uint64_t multi_entry;
/* The first symbol in the lower byte, its bits in the upper. */
typedef uint16_t single_entry;

struct decoding_tables {
    multi_entry multi[TABLE_SIZE];
    single_entry single[TABLE_SIZE];
};

/* Memory of one call that codes. */
struct workspace {
    /* The codes of two symbols, the later one in the lower bits, by the 16 bits in which both lie; their length from bit
       24 on. */
    uint32_t pairs[1 << 16];
    uint8_t streams[4][STREAM_CAPACITY];
};

/* The inner loops. They exist for every processor, and for those with AVX2 and BMI2. */
struct kernels {
    /* Write byte k of each of `count` elements of `width` bytes to plane k; see codecs/bitplanes.py for the layouts. */
    void (*split)(const uint8_t *raw, size_t count, int width, enum layout layout, uint8_t *const *planes);
    /* The inverse of split. */
    void (*merge)(const uint8_t *const *planes, size_t count, int width, enum layout layout, uint8_t *raw);
    void (*histogram)(const uint8_t *data, size_t count, uint32_t *counts);
    /* Fill `workspace->pairs` from a code. */
    void (*make_pairs)(const struct code *code, uint32_t *pairs);
    /* Write the streams of a block; `sizes` are their bytes. */
    void (*encode_streams)(const uint8_t *data, size_t count, int streams, const struct code *code,
                           struct workspace *workspace, size_t *sizes);
    /* Return whether the streams decode to exactly `count` bytes. */
    int (*decode_streams)(const uint8_t *const *starts, const size_t *sizes, int streams,
                          const struct decoding_tables *tables, uint8_t *out, size_t count);
};

extern const struct kernels plain_kernels;
#if defined(__x86_64__)
extern const struct kernels avx2_kernels;
#endif

/* huffman.c */
void make_code(const uint32_t *counts, struct code *code);
size_t write_tree(const struct code *code, uint8_t *out);
size_t read_tree(const uint8_t *data, size_t size, struct decoding_tables *tables);

/* frame.c */
size_t frame_bound(size_t count);
size_t encode_frame(const struct kernels *kernels, const uint8_t *data, size_t count, uint8_t *out,
                    struct workspace *workspace);
int decode_frame(const struct kernels *kernels, const uint8_t *frame, size_t size, uint8_t *out, size_t count,
                 struct decoding_tables *tables);

#endif
