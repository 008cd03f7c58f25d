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
/* Elements that are split or merged while they are in the core's first cache. */
#define PIECE 512

enum layout { LAYOUT_BYTES = 0, LAYOUT_EXPONENT = 1 };

/* A Huffman code. */
struct code {
    uint16_t value[SYMBOLS];
    uint8_t bits[SYMBOLS]; /* 0 for symbols that do not occur */
    int max_bits;
};

/* What a look-up of MAX_BITS bits yields: the bits that it takes in the lowest byte, where a shift by the whole entry
   finds them; the number of symbols in the next; and up to four symbols from bit 32 on. */
typedef uint64_t multi_entry;
/* The first symbol in the lower byte, its bits in the upper. */
typedef uint16_t single_entry;

/* RFC 8878, 4.2.1: the first byte of a description states at most 127 more. */
#define MAX_TREE 128

/* The tables of the description that was read last: the frames of a plane often have the same. Zeros are valid. */
struct decoder {
    multi_entry multi[TABLE_SIZE];
    single_entry single[TABLE_SIZE];
    uint8_t description[MAX_TREE];
    size_t description_size;
};

/* The codes of two symbols, the later one in the lower bits; their length from bit 32 on; KNOWN if both have one. */
typedef uint64_t pair_entry;
#define KNOWN ((pair_entry)1 << 63)
/* Masks the length of four pairs. */
#define LENGTH 0x7F

/* Symbols of a row, as many as a shuffle looks up. */
#define ROW 16

/* A code as tables of 16 symbols; only rows that hold a symbol with a code are there. */
struct rows {
    int count;                /* of rows, 0 if the value of a code does not fit in a byte */
    int joined;               /* how many symbols a store writes: they rarely take more bits than it can */
    uint8_t first;            /* the lowest symbol, from which rows are counted */
    uint32_t number[ROW];     /* the upper four bits that the symbols of a row have in common, in each byte */
    uint8_t values[ROW][ROW]; /* zeros for symbols without a code */
    uint8_t bits[ROW][ROW];
    uint8_t by_symbol[SYMBOLS]; /* all values, zeros likewise */
};

/* What is kept from one frame to the next, which hold the same plane of consecutive runs. Zeros are valid. */
struct encoder {
    struct code code;
    uint8_t description[MAX_TREE];
    size_t description_size; /* 0 if there is no code yet */
    uint8_t seen[SYMBOLS];   /* which symbols have occurred, as far as is known */
    uint8_t has_pairs, has_rows; /* whether these are of the code: an inner loop makes those that it needs */
    uint8_t used[SYMBOLS];       /* which of `pairs` hold entries, by the later symbol */
    pair_entry pairs[SYMBOLS][SYMBOLS]; /* by the two symbols, the later one first */
    struct rows rows;
    uint8_t stream[STREAM_CAPACITY];
};

/* The inner loops. They exist for every processor, for those with AVX2 and BMI2, and for those with VBMI (AVX-512). */
struct kernels {
    const char *name;
    /* Write byte k of each of `count` elements of `width` bytes to plane k; see codecs/bitplanes.py for the layouts. */
    void (*split)(const uint8_t *raw, size_t count, int width, enum layout layout, uint8_t *const *planes);
    /* The inverse of split. */
    void (*merge)(const uint8_t *const *planes, size_t count, int width, enum layout layout, uint8_t *raw);
    void (*histogram)(const uint8_t *data, size_t count, uint32_t *counts);
    /* Write a stream with the encoder's code; return its length, 0 if a symbol has none. */
    size_t (*encode_stream)(const uint8_t *data, size_t count, struct encoder *encoder, uint8_t *out);
    /* Return whether the streams decode to exactly `count` bytes. */
    int (*decode_streams)(const uint8_t *const *starts, const size_t *sizes, int streams,
                          const struct decoder *decoder, uint8_t *out, size_t count);
};

#define MAX_KINDS 3

/* Fill in the inner loops that this processor can run, the fastest last; return their number. */
int find_kernels(const struct kernels *found[MAX_KINDS]);

/* huffman.c */
void make_code(const uint32_t *counts, struct code *code);
size_t write_tree(const struct code *code, uint8_t *out);
size_t read_tree(const uint8_t *data, size_t size, struct decoder *decoder);

/* tables.c */
void make_pairs(struct encoder *encoder);
void make_rows(struct encoder *encoder);

/* frame.c */
size_t frame_bound(size_t count);
size_t coded_size(const struct kernels *kernels, const uint8_t *data, size_t count);
void reset_encoder(struct encoder *encoder);
size_t encode_frame(const struct kernels *kernels, struct encoder *encoder, const uint8_t *data, size_t count,
                    uint8_t *out, const uint8_t *end);
int decode_frame(const struct kernels *kernels, struct decoder *decoder, const uint8_t *frame, size_t size,
                 uint8_t *out, size_t count);

#endif
