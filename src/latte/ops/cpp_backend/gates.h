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

// Of the recurrence gate r and 8 softplus(theta).
template <class T>
LATTE_INLINE Kept<T> kept(V<T> r, V<T> strength) {
    V<T> log_a = larger(smaller(all(LEAST_DECAY<T>), -r * strength), all(T(-87)));  // NaN stays
    Decay<T> a = decay_above(log_a);
    return {a.kept, root(a.lost * (a.kept + T(1)))};  // 1 - a^2 = (1 - a) (1 + a)
}

// log(1 + e^x), without overflow, each within a few ulp however small it is.
LATTE_INLINE V<double> softplus(V<double> x) {
    return larger(x, V<double>{}) + each<std::log1p>(each<std::exp>(smaller(x, -x)));
}
LATTE_INLINE V<float> softplus(V<float> x) {
    // log(1 + e) = 2 artanh(s), s = e / (2 + e) <= 1/3.
    V<float> e = decay(smaller(x, -x)).kept;
    V<float> s = e / (e + 2.0f), square = s * s;
    V<float> p = all(1.0f / 15);
    for (float power : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f})
        p = p * square + power;
    return larger(x, V<float>{}) + 2.0f * s * p;
}
