/* Codes as the tables that the inner loops look up. */
#include "coder.h"

/* A store writes 16 symbols if they take about this many bits each, or fewer, and 8 of them up to the next. */
#define JOIN_16 3
#define JOIN_8 6

/* Make the table of pairs of symbols. */
void make_pairs(struct encoder *encoder) {
    const struct code *code = &encoder->code;
    for (int later = 0; later < SYMBOLS; later++) {
        pair_entry *row = encoder->pairs[later], bits = code->bits[later];
        if (bits) {
            pair_entry entry = KNOWN | bits << 32 | code->value[later];
            for (int s = 0; s < SYMBOLS; s++)
                row[s] = code->bits[s]
                             ? entry + ((pair_entry)code->bits[s] << 32 | (pair_entry)code->value[s] << bits)
                             : 0;
        } else if (encoder->used[later]) {
            memset(row, 0, sizeof encoder->pairs[later]);
        }
        encoder->used[later] = bits > 0;
    }
    encoder->has_pairs = 1;
}

/* Make the tables of 16 symbols, of a code of two symbols or more. */
void make_rows(struct encoder *encoder) {
    const struct code *code = &encoder->code;
    struct rows *rows = &encoder->rows;
    uint32_t mean = 0; /* bits of a symbol times TABLE_SIZE, if symbols are as frequent as the code supposes */
    int first = 0, fits = 1;
    memset(rows, 0, sizeof *rows);
    while (!code->bits[first]) first++;
    rows->first = (uint8_t)first;
    for (int symbol = first; symbol < SYMBOLS; symbol++) {
        int bits = code->bits[symbol], place = (symbol - first) % ROW;
        uint32_t number = (uint32_t)(symbol - first - place) * 0x01010101u;
        if (!bits) continue;
        if (!rows->count || rows->number[rows->count - 1] != number) rows->number[rows->count++] = number;
        rows->values[rows->count - 1][place] = (uint8_t)code->value[symbol];
        rows->bits[rows->count - 1][place] = (uint8_t)bits;
        rows->by_symbol[symbol] = (uint8_t)code->value[symbol];
        fits &= code->value[symbol] <= UINT8_MAX;
        mean += (uint32_t)bits << (MAX_BITS - bits);
    }
    if (!fits) rows->count = 0;
    rows->joined = mean <= JOIN_16 * TABLE_SIZE ? 16 : mean <= JOIN_8 * TABLE_SIZE ? 8 : 4;
    encoder->has_rows = 1;
}
