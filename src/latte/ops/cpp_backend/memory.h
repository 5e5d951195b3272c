// Memory for arrays. The first pass adds up their sizes, and the second pass sets their pointers.
struct Memory {
    std::vector<char> bytes;
    size_t used = 0;

    template <class T>
    T* room(int64_t count) {
        const size_t at = (reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64 + used;
        used += (size_t(count) * sizeof(T) + 63) / 64 * 64 + 64;  // not a power of two apart
        return reinterpret_cast<T*>(at);
    }
    void reserve() {
        if (bytes.size() < used + 64) bytes.assign(used + 64, 0);
    }
};
