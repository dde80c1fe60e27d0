/* Huffman decoding of baseline JPEGs in libjpeg's place: the same coefficients, with fewer steps for each.

   It is half of what decoding and shrinking a photograph takes. libjpeg's module reads a code and then the bits that
   follow it; here one lookup nearly always tells both. Nothing is made up: what is not plainly intact is an error, also
   where libjpeg would go on, and the file is libjpeg's to judge. */
#ifndef SHARDMILL_HUFFMAN_H
#define SHARDMILL_HUFFMAN_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

enum { LOOKUP_BITS = 10, LONGEST_CODE = 16 };

/* What the next bits mean. */
typedef struct {
    /* By the next `LOOKUP_BITS`: see huffman.c. */
    uint32_t entries[1 << LOOKUP_BITS];
    /* Longer codes of each length: below which 16 bits they are, and the place of the first one's symbol. */
    uint32_t ends[LONGEST_CODE + 1];
    int32_t first_places[LONGEST_CODE + 1];
    const uint8_t *symbols;
} huffman_table;

/* The bytes up to the next marker, without those that are stuffed behind each 0xFF, and then `PADDING` zeros. */
typedef struct {
    const uint8_t *next, *end;
    /* The next bits from the highest one down; behind `num_bits` of them there may be some of the byte at `next`. */
    uint64_t bits;
    unsigned num_bits;
} bit_reader;

/* The state of one scan. */
typedef struct {
    /* libjpeg's interface of such a module, and room for that of a later version. */
    void *interface[8];
    bit_reader reader;
    /* The file behind what the reader has, and what is its own. */
    const uint8_t *next, *end;
    uint8_t *bytes;
    uint64_t num_mcus_left;
    unsigned num_mcus_to_restart;
    /* It ended with an error of its own. */
    int has_given_up;
    int next_restart, last_dc[MAX_COMPS_IN_SCAN];
    huffman_table dc_tables[NUM_HUFF_TBLS], ac_tables[NUM_HUFF_TBLS];
} huffman_decoder;

/* From here on `decoder` decodes what is left of the file, if it can: call it right after `jpeg_start_decompress`.
   libjpeg keeps what it did itself for progressive files, several scans, arithmetic codes, sources other than memory,
   and where the headers of its modules are not installed. 0 if memory ran out.
   To be freed in any case. */
int huffman_take_over(huffman_decoder *decoder, j_decompress_ptr jpeg);
void huffman_free(huffman_decoder *decoder);

#endif
