// Vectors as the columns of a matrix in place of its rows: 16, or where registers are few 8 of 8 lanes.

#pragma once

#include "simd.h"

namespace pd {

#ifdef PD_AVX512

inline void transpose(F16* rows) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
        a[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    // b[4 g + j]: word j of each 4-word lane, of rows 4 g to 4 g + 3.
    for (int g = 0; g < 4; g++) {
        const __m512d low0 = _mm512_castps_pd(a[4 * g]), low1 = _mm512_castps_pd(a[4 * g + 2]);
        const __m512d high0 = _mm512_castps_pd(a[4 * g + 1]);
        const __m512d high1 = _mm512_castps_pd(a[4 * g + 3]);
        b[4 * g] = _mm512_castpd_ps(_mm512_unpacklo_pd(low0, low1));
        b[4 * g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low0, low1));
        b[4 * g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high0, high1));
        b[4 * g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high0, high1));
    }
    // Column 4 k + j: lane k of b[j], b[4 + j], b[8 + j], b[12 + j].
    for (int j = 0; j < 4; j++) {
        const __m512 even01 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88);
        const __m512 odd01 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
        const __m512 even23 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
        const __m512 odd23 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
        rows[j].v = _mm512_shuffle_f32x4(even01, even23, 0x88);
        rows[4 + j].v = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
        rows[8 + j].v = _mm512_shuffle_f32x4(even01, even23, 0xdd);
        rows[12 + j].v = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
    }
}

#else

// 8 rows of 8.
inline void transpose8(V8 (&rows)[8]) {
    V8 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        a[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    // b[4 g + j]: word j of each 4-word lane, of rows 4 g to 4 g + 3.
    for (int g = 0; g < 8; g += 4) {
        for (int j = 0; j < 2; j++) {
            const V8 low = a[g + j], high = a[g + 2 + j];
            b[g + 2 * j] = __builtin_shufflevector(low, high, 0, 1, 8, 9, 4, 5, 12, 13);
            b[g + 2 * j + 1] = __builtin_shufflevector(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
    for (int j = 0; j < 4; j++) {
        rows[j] = __builtin_shufflevector(b[j], b[4 + j], 0, 1, 2, 3, 8, 9, 10, 11);
        rows[4 + j] = __builtin_shufflevector(b[j], b[4 + j], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

// Calls put(w, word w of 8 rows) for 16 words; row(r) is row r.
template <class Row, class Put>
inline void transpose_eight(Row&& row, Put&& put) {
    for (int half = 0; half < 2; half++) {
        V8 words[8];
        for (int r = 0; r < 8; r++) words[r] = row(r).v[half];
        transpose8(words);
        for (int w = 0; w < 8; w++) put(8 * half + w, words[w]);
    }
}

#endif

}  // namespace pd
