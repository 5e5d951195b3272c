// What comes before and after the mixing of a decoder layer's token, each in one call:
//
//     n = RMSNorm(x):  q, k and v, and the latents' logits and the score of n (maps.h)
//     y = r + O x,  y + D (act(G n) * (U n)) with n = RMSNorm(y)
//
// and all layers of a model with kept tokens in one. A step of a small model reads little between
// two calls, so what the calls themselves cost is seen. The kernels are those of dense.cpp and
// quantised.cpp, with the same results.
#include <iterator>
#include <memory>

#include "maps.h"

namespace latte {

namespace {

// A linear map: its weight, or its integers and their scales.
struct Map {
    Tensor weight, scales;
    explicit Map(Stack& stack) : weight(stack.tensor()), scales(stack.maybe_tensor()) {}
};

Integers integers(Map& map) {
    Integers made;
    made.weight = std::move(map.weight), made.scales = std::move(map.scales);
    return made;
}

// residual + W x
Tensor add(const Expect& expect, Tensor x, Map& map, Tensor residual) {
    if (map.scales) {
        Products op;
        op.x = std::move(x), op.count = 1, op.maps[0] = integers(map);
        op.residual = std::move(residual);
        check_products(expect, op), run(op);
        return std::move(op.outs[0]);
    }
    Maps op;
    op.x = std::move(x), op.count = 1, op.weights[0] = std::move(map.weight);
    op.residual = std::move(residual);
    check_maps(expect, op, {"weight"}), run(op);
    return std::move(op.outs[0]);
}

// (x, norm, eps, offset, q, scales?, k, scales?, v, scales?, heads, groups, latent_q?, latent_k?,
// latent_bias?, up?, up_bias?, down?, down_bias?, score_eps) -> q, k, v, latent_q, latent_k, score
void begin(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Norm norm;
    norm.x = stack.tensor(), norm.weight = stack.tensor();
    norm.eps = stack.number(), norm.offset = stack.number();
    Map each[] = {Map(stack), Map(stack), Map(stack)};
    const int64_t heads = stack.integer(), groups = stack.integer();
    Latents latents;
    for (Tensor& weight : latents.weights) weight = stack.maybe_tensor();
    latents.bias = stack.maybe_tensor(), latents.heads = heads;
    for (Tensor* x : {&latents.up, &latents.up_bias, &latents.down, &latents.down_bias})
        *x = stack.maybe_tensor();
    latents.eps = stack.number();
    const Expect expect("cpu_layer_begin");
    expect.together({&latents.weights[0], &latents.weights[1]}, "latent_q and latent_k");
    expect.that(latents.weights[0] || (!latents.bias && !latents.up),
                "latent_bias and up need latent_q");
    expect.together({&each[0].scales, &each[1].scales, &each[2].scales}, "scales of q, k and v");
    check_norm(expect, norm);
    expect(norm.x, "x", norm.x.dtype, {ANY, ANY});
    const int64_t R = norm.x.sizes[0];
    Tensor outs[3];
    for (int m = 0; m < 3; ++m) {
        const Map& map = each[m];
        const int64_t count = m ? groups : heads;
        const int64_t outputs = map.scales ? map.scales.size(1) : map.weight.size(0);
        expect.that(count > 0 && outputs % count == 0, "heads must divide the outputs of a map");
        outs[m] = Tensor::empty({R, count, outputs / count}, norm.x.dtype);
    }
    run(norm);
    latents.x = std::move(norm.out);
    auto all = [&](auto& op) {
        op.x = std::move(latents.x), op.count = 3;
        for (int m = 0; m < 3; ++m) op.outs[m] = std::move(outs[m]);
    };
    auto done = [&](auto& op) {
        run(op), latents.x = std::move(op.x);
        for (int m = 0; m < 3; ++m) outs[m] = std::move(op.outs[m]);
    };
    if (each[0].scales) {
        Products op;
        all(op);
        for (int m = 0; m < 3; ++m) op.maps[m] = integers(each[m]);
        check_products(expect, op), done(op);
    } else {
        Maps op;
        all(op);
        for (int m = 0; m < 3; ++m) op.weights[m] = std::move(each[m].weight);
        check_maps(expect, op, {"q", "k", "v"}), done(op);
    }
    if (latents.weights[0]) check_latents(expect, latents), run(latents);
    else
        for (Tensor* x : {&latents.outs[0], &latents.outs[1], &latents.score})
            *x = Tensor::empty({R, 0}, outs[0].dtype);
    stack.give(outs[0], outs[1], outs[2], latents.outs[0], latents.outs[1], latents.score);
}

// (x, residual, o, scales?, norm, eps, offset, gate, scales?, up, scales?, down, scales?, tanh) ->
// y
void end(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Tensor x = stack.tensor(), residual = stack.tensor();
    Map output(stack);
    Tensor weight = stack.tensor();
    const double eps = stack.number(), offset = stack.number();
    Map gate(stack), up(stack), down(stack);
    const Gate kind = stack.flag() ? Gate::gelu : Gate::silu;
    const Expect expect("cpu_layer_end");
    expect.together({&gate.scales, &up.scales, &down.scales}, "scales of gate, up and down");
    expect(x, "x", FLOATS, x, Layout::contiguous);
    expect.that(x.dims > 0, "x must have at least one dimension");
    expect(residual, "residual", x.dtype, {x.sizes[0], ANY}, Layout::contiguous);
    int64_t size = 1;  // the heads of a row are one after the other
    for (int64_t d = 1; d < x.dims; ++d) size *= x.sizes[d];
    const int64_t sizes[] = {x.sizes[0], size}, strides[] = {size, 1};
    x.dims = 2, x.sizes = sizes, x.strides = strides;
    Tensor y = add(expect, std::move(x), output, std::move(residual));
    if (gate.scales) {
        Products op;
        op.x = std::move(y), op.norm = std::move(weight), op.eps = eps, op.offset = offset;
        op.count = 3, op.gate = kind, op.adds = true;
        op.maps[0] = integers(gate), op.maps[1] = integers(up), op.maps[2] = integers(down);
        check_network(expect, op), run_network(op);
        stack.give(op.outs[0]);
        return;
    }
    Norm norm;
    norm.x = std::move(y), norm.weight = std::move(weight), norm.eps = eps, norm.offset = offset;
    check_norm(expect, norm), run(norm);
    Maps inner;
    inner.x = std::move(norm.out), inner.count = 2, inner.gate = kind;
    inner.weights[0] = std::move(gate.weight), inner.weights[1] = std::move(up.weight);
    check_maps(expect, inner, {"gate", "up"}), run(inner);
    Tensor out = add(expect, std::move(inner.outs[0]), down, std::move(norm.x));
    stack.give(out);
}

// The arguments of a layer's three calls, without those that an earlier one gives: t is a tensor,
// ? maybe one, n a number, i an integer and f a flag.
constexpr char BEGIN[] = "tnnt?t?t?ii???????n", KEPT[] = "???tttt??t???nniii????";
constexpr char END[] = "t?tnnt?t?t?f";

// What the layers are given, in the order in which they take it.
class Given {
public:
    Given(std::vector<StableIValue> boxes, Tensor all)
        : tensors(std::move(boxes)), numbers(std::move(all)) {}
    Given(const Given&) = delete;
    ~Given() {
        while (tensor < tensors.size()) {
            const StableIValue box = tensors[tensor++];
            if (box) aoti_torch_delete_tensor_object(opened(box));
        }
    }
    // The number of layers.
    int64_t check(const Expect& expect) const {
        const std::string kinds = std::string(BEGIN) + KEPT + END;
        std::string places;
        std::copy_if(kinds.begin(), kinds.end(), std::back_inserter(places),
                     [](char kind) { return kind == 't' || kind == '?'; });
        const size_t count = tensors.size() / places.size(), each = kinds.size() - places.size();
        expect(numbers, "numbers", aoti_torch_dtype_float64(), {int64_t(count * each)},
               Layout::contiguous);
        bool fits = tensors.size() == count * places.size();
        for (size_t i = 0; fits && i < tensors.size(); ++i)
            fits = tensors[i] || places[i % places.size()] == '?';
        expect.that(fits, "tensors must be those of whole layers, in the order of their calls");
        return int64_t(count);
    }
    // A call's arguments: some of before, and what is taken.
    std::vector<StableIValue> arguments(std::vector<StableIValue> call, const char* kinds) {
        for (; *kinds; ++kinds) {
            if (*kinds == 't') call.push_back(StableIValue(opened(tensors[tensor++])));
            else if (*kinds == '?') call.push_back(tensors[tensor++]);
            else {
                const double x = numbers.at<double>()[number++];
                const auto whole = int64_t(x);
                call.push_back(0);
                if (*kinds == 'n') std::memcpy(&call.back(), &x, sizeof x);
                else std::memcpy(&call.back(), &whole, sizeof whole);
            }
        }
        return call;
    }

private:
    std::vector<StableIValue> tensors;
    Tensor numbers;
    size_t tensor = 0, number = 0;
    static AtenTensorHandle opened(StableIValue box) {
        const std::unique_ptr<StableIValue> own(reinterpret_cast<StableIValue*>(box));
        return reinterpret_cast<AtenTensorHandle>(*own);
    }
};

// (x, tensors!, numbers) -> x after all layers
void layers(StableIValue* arguments, uint64_t, uint64_t) {
    Stack stack(arguments);
    Tensor x = stack.tensor();
    std::vector<StableIValue> boxes = stack.maybe_tensors();
    Given given(std::move(boxes), stack.tensor());
    const Expect expect("cpu_layers");
    expect(x, "x", FLOATS, {ANY, ANY}, Layout::contiguous);
    auto boxed = [](StableIValue value) { return StableIValue(new StableIValue(value)); };
    for (int64_t layer = given.check(expect); layer > 0; --layer) {
        AtenTensorHandle again;
        check(aoti_torch_new_tensor_handle(x.handle, &again));
        auto begun = given.arguments({StableIValue(again)}, BEGIN);
        begin(begun.data(), 0, 0);
        auto mixed = given.arguments(
            {boxed(begun[3]), boxed(begun[4]), begun[0], begun[1], begun[2], begun[5]}, KEPT);
        take_kept_step(mixed.data(), 0, 0);
        auto ended = given.arguments({mixed[0], StableIValue(x.handle)}, END);
        x.handle = nullptr;
        end(ended.data(), 0, 0);
        x = Tensor(reinterpret_cast<AtenTensorHandle>(ended[0]));
    }
    stack.give(x);
}

Register registered_begin("cpu_layer_begin", begin);
Register registered_layers("cpu_layers", layers);
Register registered_end("cpu_layer_end", end);

}  // namespace

}  // namespace latte
