#include "jpeg.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>
/* after jpeglib.h, which it needs */
#include <jerror.h>

#include "area.h"
#include "huffman.h"

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or later is needed"
#endif

/* All that one call owns, so that one place gives it back however the call ends. */
typedef struct {
    struct jpeg_decompress_struct decoder;
    struct jpeg_error_mgr errors;
    jmp_buf on_failure;
    shrink_outcome outcome;
    huffman_decoder entropy;
    area_columns columns;
    uint8_t *memory_of_rows, *rows[2];
    uint16_t *sums;
} shrink_work;

/* Whose Huffman decoding. Both give the same; libjpeg's word counts on files that are not plainly intact. */
typedef enum { OURS, LIBJPEGS } entropy_decoder;

/* What becomes of the region. */
typedef enum { SHRINK, COPY } purpose;

static void fail(shrink_work *work, shrink_outcome outcome) {
    work->outcome = outcome;
    longjmp(work->on_failure, 1);
}

static void on_error(j_common_ptr decoder) {
    fail(decoder->client_data, decoder->err->msg_code == JERR_OUT_OF_MEMORY ? NO_MEMORY : DECLINED);
}

/* Negative levels are warnings: data is damaged and libjpeg would make something up. */
static void on_message(j_common_ptr decoder, int level) {
    if (level < 0) fail(decoder->client_data, DECLINED);
}

static void start(shrink_work *work, const shrink_request *request, J_COLOR_SPACE pixels) {
    j_decompress_ptr decoder = &work->decoder;
    jpeg_mem_src(decoder, request->data, request->num_bytes);
    jpeg_read_header(decoder, TRUE);
    J_COLOR_SPACE expected = request->num_channels == 1 ? JCS_GRAYSCALE : JCS_YCbCr;
    if (decoder->image_height != request->height || decoder->image_width != request->width ||
        decoder->num_components != request->num_channels || decoder->jpeg_color_space != expected)
        fail(work, DECLINED);
    decoder->scale_num = 1;
    decoder->scale_denom = request->scale;
    decoder->out_color_space = pixels;
    decoder->dct_method = JDCT_ISLOW;
    decoder->do_fancy_upsampling = TRUE;
    jpeg_start_decompress(decoder);
    if (decoder->output_components > PIXEL_LANES ||
        request->top + request->kept_height > decoder->output_height ||
        request->left + request->kept_width > decoder->output_width)
        fail(work, DECLINED);
}

/* Leaves out what lies left and right of the region, in whole blocks; returns the region's place in what is left. */
static size_t crop(shrink_work *work, const shrink_request *request) {
    j_decompress_ptr decoder = &work->decoder;
    /* Colours of fewer pixels are interpolated with those beside them: one more block on either side. */
    size_t margin = decoder->max_h_samp_factor > 1 ? (size_t)decoder->max_h_samp_factor * DCTSIZE : 0;
    size_t end = request->left + request->kept_width + margin;
    JDIMENSION from = (JDIMENSION)(request->left > margin ? request->left - margin : 0);
    JDIMENSION width = (JDIMENSION)(end < decoder->output_width ? end : decoder->output_width) - from;
    if (width < decoder->output_width) jpeg_crop_scanline(decoder, &from, &width);
    return request->left - from;
}

static void *allocate(shrink_work *work, size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) fail(work, NO_MEMORY);
    return memory;
}

/* Two rows that begin 8 bytes behind a multiple of 32: where stores could be aligned, libjpeg's go around the caches, and
   each row would come back from memory. */
static void allocate_rows(shrink_work *work) {
    size_t num_bytes = ((size_t)work->decoder.output_width * PIXEL_LANES + 31) / 32 * 32;
    work->memory_of_rows = allocate(work, 1, 2 * num_bytes + 40);
    work->rows[0] = work->memory_of_rows + (32 - (uintptr_t)work->memory_of_rows % 32) + 8;
    work->rows[1] = work->rows[0] + num_bytes;
}

/* Into the place of the row before the last one. */
static void read_row(shrink_work *work) {
    JSAMPROW row = work->rows[0];
    work->rows[0] = work->rows[1];
    work->rows[1] = row;
    if (jpeg_read_scanlines(&work->decoder, &row, 1) != 1) fail(work, DECLINED);
}

/* The same, and in the colours that are asked for from `place` on. */
static void read_kept_row(shrink_work *work, const shrink_request *request, size_t place) {
    read_row(work);
    if (request->colours) convert_colours(request->colours, work->rows[1] + place, request->kept_width, PIXEL_LANES);
}

static void skip_to(shrink_work *work, size_t row) {
    JDIMENSION num_rows = (JDIMENSION)row - work->decoder.output_scanline;
    if (num_rows && jpeg_skip_scanlines(&work->decoder, num_rows) != num_rows) fail(work, DECLINED);
}

static void shrink(shrink_work *work, const shrink_request *request) {
    area_side rows = {request->kept_height, request->new_height};
    area_side columns = {request->kept_width, request->new_width};
    size_t place = crop(work, request) * PIXEL_LANES, num_lanes = request->kept_width * PIXEL_LANES;
    if (!area_make_columns(&work->columns, columns)) fail(work, NO_MEMORY);
    allocate_rows(work);
    work->sums = allocate(work, num_lanes + area_padding_lanes(&work->columns), sizeof *work->sums);

    skip_to(work, request->top);
    uint16_t bias = area_bias(area_most(rows));
    size_t num_read = 0;
    for (size_t i = 0; i < rows.new_length; i++) {
        size_t first = area_first(rows, i), end = area_end(rows, i);
        /* The first row may be the last one of the stored row above, and is there then. */
        for (; num_read < first + 2 && num_read < end; num_read++) read_kept_row(work, request, place);
        const uint8_t *last = work->rows[1] + place, *before = work->rows[0] + place;
        if (end - first == 1)
            area_start_rows(work->sums, last, area_weight(rows, i, first), last, 0, num_lanes, bias);
        else
            area_start_rows(work->sums, before, area_weight(rows, i, first), last, area_weight(rows, i, first + 1),
                            num_lanes, bias);
        for (size_t k = first + 2; k < end; k++, num_read++) {
            read_kept_row(work, request, place);
            area_add_row(work->sums, work->rows[1] + place, area_weight(rows, i, k), num_lanes);
        }
        uint8_t *stored = request->pixels + i * request->new_width * (size_t)request->num_channels;
        area_shrink_columns(&work->columns, work->sums, stored, (size_t)request->num_channels);
    }
}

/* libjpeg does not look at rows that are skipped up to the end: the last one is read, so all before it are checked. */
static void check_the_rest(shrink_work *work) {
    if (work->decoder.output_scanline < work->decoder.output_height) {
        skip_to(work, work->decoder.output_height - 1);
        read_row(work);
    }
    jpeg_finish_decompress(&work->decoder);
}

static void copy_rows(shrink_work *work, const shrink_request *request) {
    size_t num_channels = (size_t)request->num_channels, row_bytes = request->kept_width * num_channels;
    size_t place = crop(work, request) * num_channels;
    uint8_t *pixels = request->pixels;
    if (work->decoder.output_width == request->kept_width) {
        skip_to(work, request->top);
        for (size_t i = 0; i < request->kept_height; i++, pixels += row_bytes) {
            JSAMPROW row = pixels;
            if (jpeg_read_scanlines(&work->decoder, &row, 1) != 1) fail(work, DECLINED);
        }
        return;
    }
    allocate_rows(work);
    skip_to(work, request->top);
    for (size_t i = 0; i < request->kept_height; i++, pixels += row_bytes) {
        read_row(work);
        memcpy(pixels, work->rows[1] + place, row_bytes);
    }
}

/* By itself, so that no variable of the function that calls setjmp changes after it. */
static void run(shrink_work *work, const shrink_request *request, purpose purpose, entropy_decoder by) {
    if (setjmp(work->on_failure)) return;
    jpeg_create_decompress(&work->decoder);
    J_COLOR_SPACE exact = request->num_channels == 1 ? JCS_GRAYSCALE : JCS_EXT_RGB;
    start(work, request, purpose == SHRINK ? JCS_EXT_RGBA : exact);
    if (by == OURS && !huffman_take_over(&work->entropy, &work->decoder)) fail(work, NO_MEMORY);
    if (purpose == COPY) {
        copy_rows(work, request);
    } else {
        shrink(work, request);
        check_the_rest(work);
    }
}

static shrink_outcome run_by(entropy_decoder by, const shrink_request *request, purpose purpose, int *has_given_up) {
    shrink_work work = {.outcome = SHRUNK};
    work.decoder.err = jpeg_std_error(&work.errors);
    work.errors.error_exit = on_error;
    work.errors.emit_message = on_message;
    work.decoder.client_data = &work;
    run(&work, request, purpose, by);
    jpeg_destroy_decompress(&work.decoder);
    huffman_free(&work.entropy);
    area_free_columns(&work.columns);
    free(work.memory_of_rows);
    free(work.sums);
    *has_given_up = work.entropy.has_given_up;
    return work.outcome;
}

static shrink_outcome run_for(purpose purpose, const shrink_request *request) {
    int has_given_up;
    shrink_outcome outcome = run_by(OURS, request, purpose, &has_given_up);
    return has_given_up ? run_by(LIBJPEGS, request, purpose, &has_given_up) : outcome;
}

shrink_outcome shrink_jpeg(const shrink_request *request) { return run_for(SHRINK, request); }

shrink_outcome copy_window(const shrink_request *request) { return run_for(COPY, request); }
