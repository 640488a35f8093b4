// The operators' C interface: pointers and counts, float32 and bfloat16.

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

using namespace fairway;

#define FAIRWAY_OPERATORS(SUFFIX, T)                                                                             \
    int32_t fairway_pack_##SUFFIX(const T* weight, T* packed, int64_t first, int64_t count, int64_t n, int64_t k, \
                                  int32_t gated) {                                                               \
        return pack_weight(weight, packed, first, count, n, k, gated != 0);                                      \
    }                                                                                                            \
    void fairway_linear_##SUFFIX(const LinearCall* call) { linear<T>(*call); }                                   \
    void fairway_norm_##SUFFIX(const T* x, const T* weight, T* out, int64_t rows, int64_t n, float eps,          \
                               int32_t threads) {                                                                \
        norm(x, weight, out, rows, n, eps, threads);                                                             \
    }                                                                                                            \
    void fairway_rotate_##SUFFIX(const RotateCall* call) { rotate<T>(*call); }                                   \
    void fairway_attend_##SUFFIX(const AttentionCall* call) { attend<T>(*call); }

extern "C" {
FAIRWAY_OPERATORS(f32, float)
FAIRWAY_OPERATORS(bf16, Bf16)
void fairway_rule_out(const RuleOutCall* call) { rule_out(*call); }
int32_t fairway_width() { return WIDTH; }
}
