// What comes before and after the mixing of a decoder layer's token, each in one call:
//
//     n = RMSNorm(x):  q, k and v, and the latents' logits and the score of n (maps.h)
//     y = r + O x,  y + D (act(G n) * (U n)) with n = RMSNorm(y)
//
// and all layers of a model with kept tokens in one. A step of a small model reads little between
// two calls, so what the calls themselves cost is seen. The kernels are those of dense.cpp and
// quantised.cpp, with the same results.
#include <map>
#include <memory>
#include <mutex>

#include "maps.h"

namespace latte {

namespace {

// Linear maps of the same x: of weights, or of integers with their scales.
struct Linear {
    Maps maps;
    Products products;

    void take(Stack& stack, int64_t count) {
        maps.count = products.count = count;
        for (int64_t m = 0; m < count; ++m) {
            Integers& own = products.maps[m];
            own.weight = stack.tensor(), own.scales = stack.maybe_tensor();
            if (!own.scales) maps.weights[m] = std::move(own.weight);
        }
    }
    bool quantised() const { return bool(products.maps[0].scales); }
    int64_t outputs(int64_t m) const {
        return quantised() ? products.maps[m].scales.size(1) : maps.weights[m].size(0);
    }
    Tensor& x() { return quantised() ? products.x : maps.x; }
    Tensor& residual() { return quantised() ? products.residual : maps.residual; }
    Tensor& out(int64_t m = 0) { return quantised() ? products.outs[m] : maps.outs[m]; }
    void check_kind(const Expect& expect, const char* names) const {
        for (int64_t m = 1; m < maps.count; ++m)
            expect.together({&products.maps[0].scales, &products.maps[m].scales}, names);
    }
    void check(const Expect& expect, std::initializer_list<const char*> names) {
        quantised() ? check_products(expect, products) : check_maps(expect, maps, names);
    }
    void run() { quantised() ? latte::run(products) : latte::run(maps); }
};

// What a layer does before the mixing. A check with an input makes the outputs, and then it may run
// with inputs like it, any number of times. Inputs come back.
struct Begin {
    Norm norm;
    Linear maps;  // q, k and v
    Latents latents;
    int64_t heads = 1, groups = 1;

    explicit Begin(Stack& stack) {
        norm.weight = stack.tensor(), norm.eps = stack.number(), norm.offset = stack.number();
        maps.take(stack, 3);
        heads = stack.integer(), groups = stack.integer();
        for (Tensor& weight : latents.weights) weight = stack.maybe_tensor();
        latents.bias = stack.maybe_tensor(), latents.heads = heads;
        for (Tensor* x : {&latents.up, &latents.up_bias, &latents.down, &latents.down_bias})
            *x = stack.maybe_tensor();
        latents.eps = stack.number();
    }
    void check(const Expect& expect, Tensor& x) {
        expect.together({&latents.weights[0], &latents.weights[1]}, "latent_q and latent_k");
        expect.that(latents.weights[0] || (!latents.bias && !latents.up),
                    "latent_bias and up need latent_q");
        maps.check_kind(expect, "scales of q, k and v");
        norm.x = std::move(x), check_norm(expect, norm), x = std::move(norm.x);
        expect(x, "x", x.dtype, {ANY, ANY});
        const int64_t R = x.sizes[0];
        for (int m = 0; m < 3; ++m) {
            const int64_t count = m ? groups : heads, outputs = maps.outputs(m);
            expect.that(count > 0 && outputs % count == 0,
                        "heads must divide the outputs of a map");
            maps.out(m) = Tensor::empty({R, count, outputs / count}, x.dtype);
        }
        maps.x() = std::move(norm.out), maps.check(expect, {"q", "k", "v"});
        latents.x = std::move(maps.x());
        if (latents.weights[0]) check_latents(expect, latents);
        else
            for (Tensor* out : {&latents.outs[0], &latents.outs[1], &latents.score})
                *out = Tensor::empty({R, 0}, x.dtype);
        norm.out = std::move(latents.x);
    }
    void run(Tensor& x) {
        norm.x = std::move(x), latte::run(norm), x = std::move(norm.x);
        maps.x() = std::move(norm.out), maps.run();
        latents.x = std::move(maps.x());
        if (latents.weights[0]) latte::run(latents);
        norm.out = std::move(latents.x);
    }
};

// What a layer does after the mixing, in the same way.
struct End {
    Linear output, network;  // gate, up and down; without integers, not down
    Norm norm;
    Maps down;

    explicit End(Stack& stack) {
        output.take(stack, 1);
        norm.weight = stack.tensor(), norm.eps = stack.number(), norm.offset = stack.number();
        network.take(stack, 3);
        const Gate kind = stack.flag() ? Gate::gelu : Gate::silu;
        Products& op = network.products;
        network.maps.count = 2, network.maps.gate = op.gate = kind, op.adds = true;
        down.count = 1, down.weights[0] = std::move(network.maps.weights[2]);
        if (!network.quantised()) return;
        op.norm = std::move(norm.weight), op.eps = norm.eps, op.offset = norm.offset;
    }
    Tensor& result() { return network.quantised() ? network.out() : down.outs[0]; }
    void check(const Expect& expect, Tensor& x, Tensor& residual) {
        expect.together({&network.products.maps[0].scales, &network.products.maps[1].scales,
                         &network.products.maps[2].scales},
                        "scales of gate, up and down");
        expect(x, "x", FLOATS, x, Layout::contiguous);
        expect.that(x.dims > 0, "x must have at least one dimension");
        expect(residual, "residual", x.dtype, {x.sizes[0], ANY}, Layout::contiguous);
        with_rows(x, [&](Tensor& rows) {
            output.x() = std::move(rows), output.residual() = std::move(residual);
            output.check(expect, {"weight"});
            rows = std::move(output.x()), residual = std::move(output.residual());
        });
        Tensor& y = output.out();
        if (network.quantised()) {
            Products& op = network.products;
            op.x = std::move(y), check_network(expect, op), y = std::move(op.x);
            return;
        }
        norm.x = std::move(y), check_norm(expect, norm);
        network.x() = std::move(norm.out), network.check(expect, {"gate", "up"});
        norm.out = std::move(network.x());
        down.x = std::move(network.out()), down.residual = std::move(norm.x);
        check_maps(expect, down, {"weight"});
        network.out() = std::move(down.x), y = std::move(down.residual);
    }
    void run(Tensor& x, Tensor& residual) {
        with_rows(x, [&](Tensor& rows) {
            output.x() = std::move(rows), output.residual() = std::move(residual);
            output.run();
            rows = std::move(output.x()), residual = std::move(output.residual());
        });
        Tensor& y = output.out();
        if (network.quantised()) {
            Products& op = network.products;
            op.x = std::move(y), run_network(op), y = std::move(op.x);
            return;
        }
        norm.x = std::move(y), latte::run(norm);
        network.x() = std::move(norm.out), network.run(), norm.out = std::move(network.x());
        down.x = std::move(network.out()), down.residual = std::move(norm.x);
        latte::run(down);
        network.out() = std::move(down.x), y = std::move(down.residual);
    }

private:
    // Calls work with x as (R, ...): the heads of a row are one after the other.
    template <class Work>
    static void with_rows(Tensor& x, const Work& work) {
        const int64_t dims = x.dims, *own[] = {x.sizes, x.strides};
        const int64_t rows = x.sizes[0];
        int64_t size = 1;
        for (int64_t d = 1; d < dims; ++d) size *= x.sizes[d];
        const int64_t sizes[] = {rows, size}, strides[] = {size, 1};
        x.dims = 2, x.sizes = sizes, x.strides = strides;
        work(x);
        x.dims = dims, x.sizes = own[0], x.strides = own[1];
    }
};

// (x, norm, eps, offset, q, scales?, k, scales?, v, scales?, heads, groups, latent_q?, latent_k?,
// latent_bias?, up?, up_bias?, down?, down_bias?, score_eps) -> q, k, v, latent_q, latent_k, score
void begin(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Tensor x = stack.tensor();
    Begin op(stack);
    op.check(Expect("cpu_layer_begin"), x), op.run(x);
    Latents& late = op.latents;
    stack.give(op.maps.out(0), op.maps.out(1), op.maps.out(2), late.outs[0], late.outs[1],
               late.score);
}

// (x, residual, o, scales?, norm, eps, offset, gate, scales?, up, scales?, down, scales?, tanh) ->
// y
void end(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Tensor x = stack.tensor(), residual = stack.tensor();
    End op(stack);
    op.check(Expect("cpu_layer_end"), x, residual), op.run(x, residual);
    stack.give(op.result());
}

// The arguments of a layer's three calls: t is a tensor, ? maybe one, n a number, i an integer and
// f a flag. An earlier call gives those with a space.
constexpr char BEGIN[] = "tnnt?t?t?ii???????n", KEPT[] = "      ???tttt??t???nniiin????";
constexpr char END[] = "t?tnnt?t?t?f";

// The layers of a model, with all that is the same for every token. What they are given is checked
// once, and again when x is another one or something has moved in memory.
class Layers {
public:
    Layers(std::vector<Tensor> given, const Tensor& every)
        : tensors(std::move(given)),
          numbers(every.at<double>(), every.at<double>() + count_of(every)) {}

    Tensor run(Tensor x) {
        const std::lock_guard<std::mutex> alone(busy);
        const bool same = x.dtype == dtype && x.sizes[0] == rows && x.sizes[1] == size &&
                          std::none_of(tensors.begin(), tensors.end(), has_moved);
        rows = -1;  // a call that fails leaves parts behind
        if (!same) begins.clear(), ends.clear();
        tensor = number = 0;
        Tensor spare;
        for (size_t layer = 0; tensor < tensors.size(); ++layer) {
            auto before = take(BEGIN, !same);
            if (!same) {
                Stack stack(before.data());
                begins.emplace_back(stack), begins[layer].check(Expect("cpu_layer_begin"), x);
            }
            Begin& begin = begins[layer];
            begin.run(x);
            auto mixed = take(KEPT, true);
            const Tensor* made[] = {&begin.latents.outs[0], &begin.latents.outs[1],
                                    &begin.maps.out(0),     &begin.maps.out(1),
                                    &begin.maps.out(2),     &begin.latents.score};
            for (int i = 0; i < 6; ++i) mixed[size_t(i)] = given(*made[i], i < 2);
            take_kept_step(mixed.data(), 0, 0);
            Tensor heads(reinterpret_cast<AtenTensorHandle>(mixed[0]));
            auto after = take(END, !same);
            if (!same) {
                Stack stack(after.data());
                ends.emplace_back(stack), ends[layer].check(Expect("cpu_layer_end"), heads, x);
            }
            Tensor& y = ends[layer].result();
            y = spare ? std::move(spare) : Tensor::like(x, x.sizes[1]);
            ends[layer].run(heads, x);
            if (layer) spare = std::move(x);  // the first is the caller's
            x = std::move(y);
        }
        for (Tensor& y : tensors)
            if (!same && y) y.data = place_of(y);
        dtype = x.dtype, rows = x.sizes[0], size = x.sizes[1];
        return x;
    }

private:
    std::vector<Tensor> tensors;
    std::vector<double> numbers;
    std::vector<Begin> begins;
    std::vector<End> ends;
    size_t tensor = 0, number = 0;  // those that come next
    int64_t rows = -1, size = 0;
    int32_t dtype = 0;
    std::mutex busy;

    static char* place_of(const Tensor& x) {
        const void* place;
        latte::check(torch_get_const_data_ptr(x.handle, &place));
        return static_cast<char*>(const_cast<void*>(place));
    }
    static bool has_moved(const Tensor& x) { return x && place_of(x) != x.data; }
    // An argument; in a box where it may be absent.
    static StableIValue given(const Tensor& x, bool maybe) {
        if (!x) return 0;
        AtenTensorHandle again;
        latte::check(aoti_torch_new_tensor_handle(x.handle, &again));
        const auto value = reinterpret_cast<uintptr_t>(again);
        return maybe ? reinterpret_cast<uintptr_t>(new StableIValue(value)) : value;
    }
    // The next arguments of a call, if they are wanted; 0 for those that an earlier call gives.
    std::vector<StableIValue> take(const char* kinds, bool wanted) {
        std::vector<StableIValue> call;
        for (; *kinds; ++kinds) {
            StableIValue value = 0;
            if (*kinds == 't' || *kinds == '?') {
                const Tensor& x = tensors[tensor++];
                if (wanted) value = given(x, *kinds == '?');
            } else if (*kinds != ' ') {
                const double x = numbers[number++];
                const auto whole = int64_t(x);
                std::memcpy(&value, *kinds == 'n' ? static_cast<const void*>(&x) : &whole,
                            sizeof x);
            }
            call.push_back(value);
        }
        return call;
    }
};

// All that are held, by number.
struct AllLayers {
    std::mutex busy;
    std::map<double, std::shared_ptr<Layers>> each;
    double next = 0;

    static AllLayers& here() {
        static AllLayers all;
        return all;
    }
    static double number_of(const Expect& expect, const Tensor& held) {
        expect(held, "held", aoti_torch_dtype_float64(), {1}, Layout::contiguous);
        return held.at<double>()[0];
    }
};

// (tensors, numbers) -> their number, by which the layers are called
void hold(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    std::vector<Tensor> tensors;
    for (StableIValue box : stack.maybe_tensors()) {
        const std::unique_ptr<StableIValue> own(reinterpret_cast<StableIValue*>(box));
        tensors.push_back(own ? Tensor(reinterpret_cast<AtenTensorHandle>(*own)) : Tensor());
    }
    const Tensor numbers = stack.tensor();
    const Expect expect("cpu_layers_hold");
    std::string places;
    int64_t each = 0;
    for (const char kind : std::string(BEGIN) + KEPT + END)
        if (kind == 't' || kind == '?') places += kind;
        else each += kind != ' ';
    const size_t layers = tensors.size() / places.size();
    expect(numbers, "numbers", aoti_torch_dtype_float64(), {int64_t(layers) * each},
           Layout::contiguous);
    bool fits = tensors.size() == layers * places.size();
    for (size_t i = 0; fits && i < tensors.size(); ++i)
        fits = tensors[i] || places[i % places.size()] == '?';
    expect.that(fits, "tensors must be those of whole layers, in the order of their calls");
    Tensor held = Tensor::empty({1}, aoti_torch_dtype_float64());
    AllLayers& all = AllLayers::here();
    const std::lock_guard<std::mutex> alone(all.busy);
    all.each[all.next] = std::make_shared<Layers>(std::move(tensors), numbers);
    held.at<double>()[0] = all.next++;
    stack.give(held);
}

// (held) -> nothing
void drop(StableIValue* arguments, uint64_t, uint64_t) {
    const Tensor held = Stack(arguments).tensor();
    const double number = AllLayers::number_of(Expect("cpu_layers_drop"), held);
    AllLayers& all = AllLayers::here();
    const std::lock_guard<std::mutex> alone(all.busy);
    all.each.erase(number);
}

// (x, held) -> x after all layers
void layers(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Tensor x = stack.tensor();
    const Tensor held = stack.tensor();
    const Expect expect("cpu_layers");
    const double number = AllLayers::number_of(expect, held);
    expect(x, "x", FLOATS, {ANY, ANY}, Layout::contiguous);
    std::shared_ptr<Layers> found;
    {
        AllLayers& all = AllLayers::here();
        const std::lock_guard<std::mutex> alone(all.busy);
        const auto at = all.each.find(number);
        expect.that(at != all.each.end(), "held must be what cpu_layers_hold gave");
        found = at->second;
    }
    Tensor y = found->run(std::move(x));
    stack.give(y);
}

Register registered_begin("cpu_layer_begin", begin);
Register registered_hold("cpu_layers_hold", hold);
Register registered_layers("cpu_layers", layers);
Register registered_drop("cpu_layers_drop", drop);
Register registered_end("cpu_layer_end", end);

}  // namespace

}  // namespace latte
