#include "huffman.h"

#if defined(__has_include)
#if __has_include(<jpegint.h>)
#define HAS_MODULES
#endif
#endif

#ifndef HAS_MODULES

int huffman_take_over(huffman_decoder *decoder, j_decompress_ptr jpeg) {
    (void)decoder;
    (void)jpeg;
    return 1;
}

void huffman_free(huffman_decoder *decoder) { (void)decoder; }

#else

#include <stdlib.h>
#include <string.h>

#include <jpegint.h>
/* after jpeglib.h, which it needs */
#include <jerror.h>

#include "dispatch.h"

/* An entry is, from the lowest bit: the number of bits to take (6), what kind it is (2), by how much the place of the
   coefficient is behind that of the one before (8), and in the high half the coefficient, or the number of bits that
   follow and tell it. Without a kind there is no coefficient; without a length the code is longer than the lookup. */
enum {
    LENGTH_MASK = 63,
    /* Code and coefficient are within the lookup. */
    COEFFICIENT = 1 << 7,
    /* The code is, and the coefficient's bits follow. */
    BITS_FOLLOW = 1 << 6,
    STEP_SHIFT = 8,
    STEP_MASK = 255,
    VALUE_SHIFT = 16,
    /* A step out of the block: no further coefficient. */
    END_OF_BLOCK = 128,
};

/* Sixteen zeros, and no coefficient behind them. */
enum { ZERO_RUN = 0xF0 };

/* More than a block of the longest codes and coefficients takes. */
enum { PADDING = 512 };

/* The places of coefficients as they come; what lies behind the last one is found out when the block is done. */
static const uint8_t PLACES[DCTSIZE2 + 16] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13,
    6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31,
    39, 46, 53, 60, 61, 54, 47, 55, 62, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
};

/* Does not return: the caller's handler of errors does not. */
static void give_up(j_decompress_ptr jpeg) {
    ((huffman_decoder *)(void *)jpeg->entropy)->has_given_up = 1;
    ERREXIT(jpeg, JERR_BAD_DCT_COEF);
}

/* `size` bits as a coefficient: those that begin with 0 are negative. */
static inline int extended(unsigned bits, unsigned size) {
    return bits < 1u << (size - 1) ? (int)bits - (1 << size) + 1 : (int)bits;
}

static uint32_t entry_of(uint8_t symbol, unsigned length, int is_dc) {
    unsigned step = is_dc ? 0 : 1 + (symbol >> 4), size = is_dc ? symbol : symbol & 15;
    if (size) return length | BITS_FOLLOW | step << STEP_SHIFT | (uint32_t)size << VALUE_SHIFT;
    if (is_dc) return length | COEFFICIENT;
    return length | (uint32_t)(symbol == ZERO_RUN ? step : END_OF_BLOCK) << STEP_SHIFT;
}

/* All entries that begin with a code. */
static void add_code(huffman_table *table, unsigned code, unsigned length, uint32_t entry) {
    unsigned num_left = LOOKUP_BITS - length, size = entry >> VALUE_SHIFT;
    uint32_t *entries = table->entries + ((size_t)code << num_left);
    if (!(entry & BITS_FOLLOW) || size > num_left) {
        for (size_t i = 0; i < (size_t)1 << num_left; i++) entries[i] = entry;
        return;
    }
    uint32_t step = entry & STEP_MASK << STEP_SHIFT;
    for (size_t i = 0; i < (size_t)1 << num_left; i++) {
        int value = extended((unsigned)(i >> (num_left - size)), size);
        entries[i] = (length + size) | COEFFICIENT | step | (uint32_t)value << VALUE_SHIFT;
    }
}

/* libjpeg has checked that the codes fit their lengths. */
static void make_table(huffman_table *table, const JHUFF_TBL *codes, int is_dc) {
    memset(table->entries, 0, sizeof table->entries);
    table->symbols = codes->huffval;
    unsigned code = 0;
    int place = 0;
    for (unsigned length = 1; length <= LONGEST_CODE; length++, code <<= 1) {
        table->first_places[length] = place - (int)code;
        for (unsigned i = 0; i < codes->bits[length]; i++, code++, place++)
            if (length <= LOOKUP_BITS)
                add_code(table, code, length, entry_of(codes->huffval[place], length, is_dc));
        table->ends[length] = code << (LONGEST_CODE - length);
    }
}

/* At least 56 bits. Within a block `next` may get behind the end. */
static inline void refill(bit_reader *reader) {
    uint64_t word;
    memcpy(&word, reader->next, sizeof word);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    reader->bits |= word >> reader->num_bits;
    reader->next += (63 - reader->num_bits) / 8;
    reader->num_bits |= 56;
}

/* How many bits of a segment are left: negative if more were taken than there are. */
static inline ptrdiff_t num_left(const bit_reader *reader) {
    return 8 * (reader->end - reader->next) + (ptrdiff_t)reader->num_bits;
}

static inline void drop(bit_reader *reader, unsigned num_bits) {
    reader->bits <<= num_bits;
    reader->num_bits -= num_bits;
}

/* What the next bits mean; at most `LOOKUP_BITS` of them if it is a coefficient. */
static inline uint32_t look_up(const huffman_table *table, const bit_reader *reader) {
    return table->entries[reader->bits >> (64 - LOOKUP_BITS)];
}

static uint32_t find_long_code(j_decompress_ptr jpeg, const huffman_table *table, uint64_t bits, int is_dc) {
    unsigned next = (unsigned)(bits >> (64 - LONGEST_CODE));
    for (unsigned length = LOOKUP_BITS + 1; length <= LONGEST_CODE; length++)
        if (next < table->ends[length]) {
            int place = table->first_places[length] + (int)(next >> (LONGEST_CODE - length));
            return entry_of(table->symbols[place & 255], length, is_dc);
        }
    give_up(jpeg);
    return 0;
}

/* Takes the code of an entry of any kind, and the bits that follow: up to 31. Returns the coefficient, if there is one. */
static inline int take(j_decompress_ptr jpeg, bit_reader *reader, const huffman_table *table, uint32_t *entry,
                       int is_dc) {
    if (!*entry) *entry = find_long_code(jpeg, table, reader->bits, is_dc);
    drop(reader, *entry & LENGTH_MASK);
    if (!(*entry & BITS_FOLLOW)) return (int32_t)*entry >> VALUE_SHIFT;
    unsigned size = *entry >> VALUE_SHIFT, bits = (unsigned)(reader->bits >> (64 - size));
    drop(reader, size);
    return extended(bits, size);
}

__attribute__((always_inline)) static inline void
decode_block(j_decompress_ptr jpeg, bit_reader *reader, const huffman_table *dc, const huffman_table *ac, int *last_dc,
             JCOEFPTR block) {
    refill(reader);
    uint32_t entry = look_up(dc, reader);
    *last_dc += take(jpeg, reader, dc, &entry, 1);
    if (*last_dc != (JCOEF)*last_dc) give_up(jpeg);
    block[0] = (JCOEF)*last_dc;
    unsigned place = 0;
    while (place < DCTSIZE2 - 1) {
        refill(reader);
        /* Nine of ten symbols are found with their coefficients; there are bits for two of them and any third one. */
        for (int i = 0; i < 3; i++) {
            entry = look_up(ac, reader);
            if (__builtin_expect(!(entry & COEFFICIENT), 0)) {
                int value = take(jpeg, reader, ac, &entry, 0);
                place += entry >> STEP_SHIFT & STEP_MASK;
                if (entry & BITS_FOLLOW) block[PLACES[place]] = (JCOEF)value;
                break;
            }
            drop(reader, entry & LENGTH_MASK);
            place += entry >> STEP_SHIFT & STEP_MASK;
            block[PLACES[place]] = (JCOEF)(entry >> VALUE_SHIFT);
            if (place >= DCTSIZE2 - 1) break;
        }
    }
    int is_complete = place == DCTSIZE2 - 1 || place >= END_OF_BLOCK;
    if (!is_complete || num_left(reader) < 0) give_up(jpeg);
}

/* Reads up to the next marker. */
static void start_segment(huffman_decoder *decoder) {
    uint8_t *stored = decoder->bytes;
    while (decoder->next < decoder->end) {
        size_t num_bytes = (size_t)(decoder->end - decoder->next);
        const uint8_t *found = memchr(decoder->next, 0xFF, num_bytes);
        int is_stuffed = found && found + 1 < decoder->end && !found[1];
        if (found) num_bytes = (size_t)(found - decoder->next) + (is_stuffed ? 1 : 0);
        memcpy(stored, decoder->next, num_bytes);
        stored += num_bytes;
        decoder->next += num_bytes + (is_stuffed ? 1 : 0);
        if (found && !is_stuffed) break;
    }
    memset(stored, 0, PADDING);
    decoder->reader = (bit_reader){decoder->bytes, stored, 0, 0};
    memset(decoder->last_dc, 0, sizeof decoder->last_dc);
}

/* Behind the last block of a segment there are less bits than a byte has, and then a marker. */
static void end_segment(j_decompress_ptr jpeg, const huffman_decoder *decoder, const bit_reader *reader) {
    if (num_left(reader) >= 8 || decoder->end - decoder->next < 2) give_up(jpeg);
}

static void restart(j_decompress_ptr jpeg, huffman_decoder *decoder) {
    end_segment(jpeg, decoder, &decoder->reader);
    /* Any number of 0xFF may stand before a marker. */
    while (decoder->end - decoder->next > 2 && decoder->next[1] == 0xFF) decoder->next++;
    if (decoder->next[1] != JPEG_RST0 + decoder->next_restart) give_up(jpeg);
    decoder->next += 2;
    decoder->next_restart = (decoder->next_restart + 1) & 7;
    decoder->num_mcus_to_restart = jpeg->restart_interval;
    start_segment(decoder);
}

/* libjpeg's markers go on where the scan has ended. */
static void finish(j_decompress_ptr jpeg, const huffman_decoder *decoder, const bit_reader *reader) {
    end_segment(jpeg, decoder, reader);
    jpeg->src->next_input_byte = decoder->next;
    jpeg->src->bytes_in_buffer = (size_t)(decoder->end - decoder->next);
}

/* As libjpeg calls it: zeroed blocks, or none if nobody looks at them. */
FOR_EACH_PROCESSOR
static boolean decode_mcu(j_decompress_ptr jpeg, JBLOCKROW *blocks) {
    huffman_decoder *decoder = (huffman_decoder *)(void *)jpeg->entropy;
    JBLOCK unseen;
    if (jpeg->restart_interval) {
        if (!decoder->num_mcus_to_restart) restart(jpeg, decoder);
        decoder->num_mcus_to_restart--;
    }
    bit_reader reader = decoder->reader;
    for (int i = 0; i < jpeg->blocks_in_MCU; i++) {
        int place = jpeg->MCU_membership[i];
        const jpeg_component_info *component = jpeg->cur_comp_info[place];
        decode_block(jpeg, &reader, &decoder->dc_tables[component->dc_tbl_no],
                     &decoder->ac_tables[component->ac_tbl_no], &decoder->last_dc[place],
                     blocks ? *blocks[i] : unseen);
    }
    if (!--decoder->num_mcus_left) finish(jpeg, decoder, &reader);
    decoder->reader = reader;
    return TRUE;
}

int huffman_take_over(huffman_decoder *decoder, j_decompress_ptr jpeg) {
    if (jpeg_has_multiple_scans(jpeg) || jpeg->progressive_mode || jpeg->arith_code || jpeg->data_precision != 8)
        return 1;
    struct jpeg_entropy_decoder *module = (struct jpeg_entropy_decoder *)(void *)decoder->interface;
    _Static_assert(sizeof *module <= sizeof decoder->interface, "room for libjpeg's interface");
    memset(decoder->interface, 0, sizeof decoder->interface);
    module->decode_mcu = decode_mcu;
    decoder->next = jpeg->src->next_input_byte;
    decoder->end = decoder->next + jpeg->src->bytes_in_buffer;
    decoder->bytes = malloc(jpeg->src->bytes_in_buffer + PADDING);
    if (!decoder->bytes) return 0;
    decoder->num_mcus_left = (uint64_t)jpeg->MCUs_per_row * jpeg->MCU_rows_in_scan;
    decoder->num_mcus_to_restart = jpeg->restart_interval;
    decoder->next_restart = 0;
    for (int i = 0; i < jpeg->comps_in_scan; i++) {
        int dc = jpeg->cur_comp_info[i]->dc_tbl_no, ac = jpeg->cur_comp_info[i]->ac_tbl_no;
        make_table(&decoder->dc_tables[dc], jpeg->dc_huff_tbl_ptrs[dc], 1);
        make_table(&decoder->ac_tables[ac], jpeg->ac_huff_tbl_ptrs[ac], 0);
    }
    start_segment(decoder);
    jpeg->entropy = module;
    return 1;
}

void huffman_free(huffman_decoder *decoder) { free(decoder->bytes); }

#endif
