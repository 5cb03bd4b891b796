/* AVX-512 by SIMDe (https://github.com/simd-everywhere/simde) on an AVX2 CPU, so that tests run the AVX-512 kernels on
 * any host. SIMDe maps fmadd to two 256-bit instructions, so it is fused; intrinsics its release lacks are added here
 * as two AVX2 halves. Never part of a product build. */
#ifndef CLB_AVX512_EMULATE_H
#define CLB_AVX512_EMULATE_H
#if !defined(__FMA__) || !defined(__AVX2__) || !defined(__F16C__)
#error "emulation needs -mavx2 -mfma -mf16c: without them SIMDe's fmadd rounds twice"
#endif
#pragma GCC diagnostic ignored "-Wpsabi"
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
/* after SIMDe, which defines the AVX-512 types where the compiler's target has none */
#include <immintrin.h>
#include <string.h>

#define CLB_UNROLL /* nothing: unrolled emulations take minutes to compile */
#define CLB_EMU static inline __attribute__((always_inline))
typedef struct clb_emu_ps { __m256 h[2]; } clb_emu_ps;
typedef struct clb_emu_si { __m256i h[2]; } clb_emu_si;
typedef struct clb_emu_pd { __m256d h[2]; } clb_emu_pd;
CLB_EMU clb_emu_ps clb_emu_split_ps(__m512 v) { clb_emu_ps r; memcpy(&r, &v, 64); return r; }
CLB_EMU clb_emu_si clb_emu_split_si(__m512i v) { clb_emu_si r; memcpy(&r, &v, 64); return r; }
CLB_EMU __m512 clb_emu_join_ps(clb_emu_ps v) { __m512 r; memcpy(&r, &v, 64); return r; }
CLB_EMU __m512i clb_emu_join_si(clb_emu_si v) { __m512i r; memcpy(&r, &v, 64); return r; }
CLB_EMU __m512d clb_emu_join_pd(clb_emu_pd v) { __m512d r; memcpy(&r, &v, 64); return r; }

CLB_EMU __m512 clb_emu_cvtepi32_ps(__m512i a) {
    clb_emu_si s = clb_emu_split_si(a);
    return clb_emu_join_ps((clb_emu_ps){{_mm256_cvtepi32_ps(s.h[0]), _mm256_cvtepi32_ps(s.h[1])}});
}
CLB_EMU __m512i clb_emu_cvtps_epi32(__m512 a) {
    clb_emu_ps s = clb_emu_split_ps(a);
    return clb_emu_join_si((clb_emu_si){{_mm256_cvtps_epi32(s.h[0]), _mm256_cvtps_epi32(s.h[1])}});
}
CLB_EMU __m512i clb_emu_cvttps_epi32(__m512 a) {
    clb_emu_ps s = clb_emu_split_ps(a);
    return clb_emu_join_si((clb_emu_si){{_mm256_cvttps_epi32(s.h[0]), _mm256_cvttps_epi32(s.h[1])}});
}
CLB_EMU __m512 clb_emu_cvtph_ps(__m256i a) {
    __m128i lo = _mm256_castsi256_si128(a), hi = _mm256_extracti128_si256(a, 1);
    return clb_emu_join_ps((clb_emu_ps){{_mm256_cvtph_ps(lo), _mm256_cvtph_ps(hi)}});
}
CLB_EMU __m256i clb_emu_cvtps_ph(__m512 a) {
    clb_emu_ps s = clb_emu_split_ps(a);
    return _mm256_set_m128i(_mm256_cvtps_ph(s.h[1], 0), _mm256_cvtps_ph(s.h[0], 0));
}
CLB_EMU __m512d clb_emu_cvtps_pd(__m256 a) {
    __m128 lo = _mm256_castps256_ps128(a), hi = _mm256_extractf128_ps(a, 1);
    return clb_emu_join_pd((clb_emu_pd){{_mm256_cvtps_pd(lo), _mm256_cvtps_pd(hi)}});
}
CLB_EMU __m512i clb_emu_cvtepu16_epi32(__m256i a) {
    __m128i lo = _mm256_castsi256_si128(a), hi = _mm256_extracti128_si256(a, 1);
    return clb_emu_join_si((clb_emu_si){{_mm256_cvtepu16_epi32(lo), _mm256_cvtepu16_epi32(hi)}});
}
CLB_EMU __m256i clb_emu_cvtepi32_epi16(__m512i a) { /* values that fit */
    clb_emu_si s = clb_emu_split_si(a);
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(s.h[0], s.h[1]), 0xd8);
}
CLB_EMU __m512i clb_emu_cvtepi32_epi64(__m256i a) {
    __m128i lo = _mm256_castsi256_si128(a), hi = _mm256_extracti128_si256(a, 1);
    return clb_emu_join_si((clb_emu_si){{_mm256_cvtepi32_epi64(lo), _mm256_cvtepi32_epi64(hi)}});
}
CLB_EMU __m512i clb_emu_srai_epi32(__m512i a, int n) {
    clb_emu_si s = clb_emu_split_si(a);
    return clb_emu_join_si((clb_emu_si){{_mm256_srai_epi32(s.h[0], n), _mm256_srai_epi32(s.h[1], n)}});
}
CLB_EMU __m512 clb_emu_maskz_loadu_ps(__mmask16 k, const float *p) {
    float t[16] = {0};
    for (int i = 0; i < 16; i++)
        if (k >> i & 1) t[i] = p[i];
    return _mm512_loadu_ps(t);
}
CLB_EMU __m512i clb_emu_maskz_loadu_epi32(__mmask16 k, const int32_t *p) {
    int32_t t[16] = {0};
    for (int i = 0; i < 16; i++)
        if (k >> i & 1) t[i] = p[i];
    return _mm512_loadu_si512(t);
}
CLB_EMU void clb_emu_mask_storeu_ps(float *p, __mmask16 k, __m512 a) {
    float t[16];
    _mm512_storeu_ps(t, a);
    for (int i = 0; i < 16; i++)
        if (k >> i & 1) p[i] = t[i];
}
CLB_EMU __m512 clb_emu_shuffle_f32x4(__m512 a, __m512 b, int from) { /* two 128-bit lanes of a, then two of b */
    float x[16], y[16], r[16];
    _mm512_storeu_ps(x, a), _mm512_storeu_ps(y, b);
    for (int i = 0; i < 4; i++) memcpy(r + 4 * i, (i < 2 ? x : y) + 4 * (from >> (2 * i) & 3), 16);
    return _mm512_loadu_ps(r);
}

/* compilers define some of them for targets without AVX-512 too */
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtps_epi32
#undef _mm512_cvttps_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_cvtps_pd
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtepi32_epi64
#undef _mm512_srai_epi32
#undef _mm512_maskz_loadu_ps
#undef _mm512_maskz_loadu_epi32
#undef _mm512_mask_storeu_ps
#undef _mm512_shuffle_f32x4
#define _mm512_cvtepi32_ps clb_emu_cvtepi32_ps
#define _mm512_cvtps_epi32 clb_emu_cvtps_epi32
#define _mm512_cvttps_epi32 clb_emu_cvttps_epi32
#define _mm512_cvtph_ps clb_emu_cvtph_ps
#define _mm512_cvtps_ph(a, rounding) clb_emu_cvtps_ph(a) /* rounding 0: to nearest even */
#define _mm512_cvtps_pd clb_emu_cvtps_pd
#define _mm512_cvtepu16_epi32 clb_emu_cvtepu16_epi32
#define _mm512_cvtepi32_epi64 clb_emu_cvtepi32_epi64
#define _mm512_cvtepi32_epi16 clb_emu_cvtepi32_epi16
#define _mm512_srai_epi32 clb_emu_srai_epi32
#define _mm512_maskz_loadu_ps clb_emu_maskz_loadu_ps
#define _mm512_maskz_loadu_epi32 clb_emu_maskz_loadu_epi32
#define _mm512_mask_storeu_ps clb_emu_mask_storeu_ps
#define _mm512_shuffle_f32x4 clb_emu_shuffle_f32x4
#endif
