// The RG-LRU's gates, for one instruction set: included by what LATTE_FILE names, once per
// namespace.

// log a is never quite 0, where the square root has no slope.
template <class T> constexpr T LEAST_DECAY;
template <> constexpr float LEAST_DECAY<float> = -1.1754943508222875e-38f;
template <> constexpr double LEAST_DECAY<double> = -2.2250738585072014e-308;

// What is kept of the state, and the input's factor sqrt(1 - a^2).
template <class T>
struct Kept {
    V<T> a, factor;
};

// The arguments are the recurrence gate and 8 softplus(theta).
template <class T>
LATTE_INLINE Kept<T> kept(V<T> r, V<T> strength) {
    V<T> log_a = larger(smaller(all(LEAST_DECAY<T>), -r * strength), all(T(-87)));  // NaN stays
    Decay<T> a = decay_above(log_a);
    return {a.kept, root(a.lost * (a.kept + T(1)))};  // 1 - a^2 = (1 - a) (1 + a)
}

// log(1 + e^x), without overflow, within a few ulp however small it is.
template <class T> LATTE_INLINE V<T> softplus(V<T> x) {
    return larger(x, V<T>{}) + log_one_plus(decay(smaller(x, -x)).kept);
}
