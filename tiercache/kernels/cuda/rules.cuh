// The arithmetic of the optimizers of store/optimizer.py, one element of a row at a time: as cpu/rules.py.

#pragma once

#define SGD 0
#define MOMENTUM 1
#define ADAGRAD 2
#define ADAM 3
#define ROWWISE_ADAGRAD 4  // row-wise rules from here on
#define ROWWISE_ADAM 5
#define ROWWISE_RMSPROP 6

// The name of each rule, and the blocks that share an SM's registers in its quick kernels.
#define RULES(DO) \
    DO(sgd, SGD, 4) \
    DO(momentum, MOMENTUM, 4) \
    DO(adagrad, ADAGRAD, 4) \
    DO(adam, ADAM, 4) \
    DO(rowwise_adagrad, ROWWISE_ADAGRAD, 3) \
    DO(rowwise_adam, ROWWISE_ADAM, 3) \
    DO(rowwise_rmsprop, ROWWISE_RMSPROP, 3)

struct Rule {  // as kernels/step.py
    float rate;
    float eps;
    float decay;
    float keep;
    float a;
    float b;
};

// The states of a rule that have a number for each element. A row-wise rule has one more number per row.
__device__ constexpr int elements_of(int kind) {
    return kind == ADAM ? 2 : kind == MOMENTUM || kind == ADAGRAD || kind == ROWWISE_ADAM ? 1 : 0;
}

__device__ constexpr bool is_row_wise(int kind) { return kind >= ROWWISE_ADAGRAD; }

// The new number of a row, whose gradient has this mean of squares; the rate is divided by its root.
template <int KIND> __device__ __forceinline__ float step_number(const Rule& rule, float number, float mean) {
    if constexpr (KIND == ROWWISE_ADAGRAD) return number + mean;
    return number + (mean - number) * rule.b;
}

// The amount subtracted from an element with the gradient g; its states change.
template <int KIND>
__device__ __forceinline__ float step_element(const Rule& rule, float rate, float g, float& first, float& second) {
    if constexpr (KIND == MOMENTUM) {
        first = first * rule.a + g;
        return rate * (rule.b != 0.0f ? g + first * rule.b : first);
    } else if constexpr (KIND == ADAGRAD) {
        first += g * g;
        return rate * g / (sqrtf(first) + rule.eps);
    } else if constexpr (KIND == ADAM) {
        first += (g - first) * rule.a;
        second += (g * g - second) * rule.b;
        return rate * first / (sqrtf(second) + rule.eps);
    } else if constexpr (KIND == ROWWISE_ADAM) {
        first += (g - first) * rule.a;
        return rate * first;
    } else {
        return rate * g;
    }
}
