// All other operators: shapes from the meta device, work from the CPU's kernels, in the order of a stream.
//
// A call finds its device, gives each operator a random generator of its own, asks the meta device for the shapes of
// the results, allocates them, queues the work and returns. Where shapes depend on data, the host waits for the stream
// and does the work itself.
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

#include <shared_mutex>

#include "generators.h"
#include "launch.h"
#include "memory.h"
#include "timing.h"

namespace late {

namespace {

using c10::IValue;
using Values = std::vector<IValue>;
using ByTensor = std::unordered_map<c10::TensorImpl*, at::Tensor>;

c10::TensorImpl* id(const at::Tensor& t) { return t.unsafeGetTensorImpl(); }

/// Exchange each tensor in a value, and devices of late for `device`.
template <class F>
IValue mapped(const IValue& value, F&& f, std::optional<at::Device> device = std::nullopt) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : value.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      out.push_back(t && t->defined() ? std::optional<at::Tensor>(f(*t)) : t);
    return out;
  }
  if (device && value.isDevice() && value.toDevice().is_privateuseone()) return *device;
  return value;
}

template <class F>
void each(const IValue& value, F&& f) {
  if (value.isTensor() && value.toTensor().defined()) return f(value.toTensor());
  if (value.isTensorList() || value.isOptionalTensorList())
    mapped(value, [&](const at::Tensor& t) { f(t); return t; });
}

/// All tensors of a result, those that are not defined included.
std::vector<at::Tensor> flat(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isNone()) return {at::Tensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

bool starts(const std::string& name, const char* with) { return name.rfind(with, 0) == 0; }

at::Tensor on_meta(const at::Tensor& t) {
  auto meta = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
  if (id(t)->is_wrapped_number()) id(meta)->set_wrapped_number(true);
  return meta;
}

/// One call of an operator.
struct Call {
  c10::OperatorHandle op;
  const c10::FunctionSchema& schema;
  std::string name;
  Values args;
  c10::Device device{c10::DeviceType::PrivateUse1, 0};
  std::vector<Used> uses;

  Call(const c10::OperatorHandle& op, Values args) : op(op), schema(op.schema()), args(std::move(args)) {
    const auto& full = schema.operator_name().name;
    name = full.substr(full.find("::") + 2);
  }

  std::string told() const {
    return name + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  }

  void find_device();
  bool gives_tensors() const;
  void draw();
  void find_uses();
};

void Call::find_device() {
  std::optional<c10::Device> found;
  auto refuse = [&](const at::Tensor& t) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ", t.device(), "! (late, in ", told(), ")");
  };
  const bool scales = starts(name, "_amp_");  // takes gradients of several devices
  const bool indexes = starts(name, "index") || starts(name, "_index_put_impl_") || starts(name, "_unsafe_index");
  for (auto& arg : args)
    each(arg, [&](const at::Tensor& t) {
      if (!is_late(t)) return;
      if (!found) found = t.device();
      if (*found != t.device() && !scales) refuse(t);
    });
  if (!found)
    for (auto& arg : args)
      if (arg.isDevice() && arg.toDevice().is_privateuseone()) found = arg.toDevice();
  if (!found || !found->has_index()) found = c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(t_device));
  for (auto& arg : args)
    each(arg, [&](const at::Tensor& t) {
      if (!is_late(t) && !(t.is_cpu() && (t.dim() == 0 || indexes))) refuse(t);
    });
  device = *found;
}

bool Call::gives_tensors() const {
  bool tensors = true;
  for (auto& ret : schema.returns()) {
    auto type = ret.type();
    tensors &= type->kind() == c10::TypeKind::TensorType || type->isSubtypeOf(*c10::ListType::ofTensors());
    TORCH_CHECK(!ret.alias_info() || ret.alias_info()->isWrite(), "late does not know the view ", told());
  }
  return tensors;
}

void Call::draw() {
  for (size_t k = 0; k < args.size(); k++) {
    auto type = schema.arguments()[k].type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType)
      args[k] = drawn_from(args[k].isNone() ? default_generator(device.index()) : args[k].toGenerator());
  }
}

void Call::find_uses() {
  for (size_t k = 0; k < args.size(); k++) {
    const auto& argument = schema.arguments()[k];
    // Batch norms write their statistics, and do not say so.
    const bool writes = (argument.alias_info() && argument.alias_info()->isWrite()) ||
        argument.name() == "running_mean" || argument.name() == "running_var";
    each(args[k], [&](const at::Tensor& t) { if (is_late(t) && t.numel()) uses.push_back({t.data_ptr(), writes}); });
  }
}

// ------------------------------------------------------------------------------------------------------------- shapes

struct Shapes {
  Values results;      // tensors of the meta device, and arguments of late
  ByTensor originals;  // by their stand-ins on the meta device
};

/// Ask the meta device. None if it does not know: shapes depend on data, or the call is wrong, which the CPU will say.
std::optional<Shapes> shapes_of(const Call& call) {
  ByTensor metas;
  Shapes shapes;
  try {
    for (auto& arg : call.args)
      shapes.results.push_back(arg.isGenerator() ? IValue() : mapped(arg, [&](const at::Tensor& t) -> at::Tensor {
        if (!is_late(t)) return t;
        auto& meta = metas[id(t)];
        if (!meta.defined()) {
          meta = on_meta(t);
          shapes.originals[id(meta)] = t;
        }
        return meta;
      }, at::Device(at::kMeta)));
    call.op.callBoxed(&shapes.results);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (auto& [meta, t] : shapes.originals)
    if (!t.sizes().equals(meta->sizes())) at::native::resize_(t, meta->sizes(), std::nullopt);
  return shapes;
}

struct Results {
  Values values;
  std::vector<std::optional<Span>> fresh;  // for each tensor; none for an argument
};

Results allocate(const Shapes& shapes, Call& call) {
  Results results;
  std::set<c10::TensorImpl*> made;
  for (auto& result : shapes.results)
    results.values.push_back(mapped(result, [&](const at::Tensor& meta) -> at::Tensor {
      auto it = shapes.originals.find(id(meta));
      if (it != shapes.originals.end()) return it->second;
      auto t = meta.is_cpu() ? meta : at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(call.device));
      made.insert(id(t));
      if (t.numel()) call.uses.push_back({t.data_ptr(), true});
      return t;
    }));
  for (auto& value : results.values)
    for (auto& t : flat(value))
      results.fresh.push_back(t.defined() && made.count(id(t)) ? std::optional<Span>(Span(t)) : std::nullopt);
  return results;
}

// --------------------------------------------------------------------------------------------------------------- work

/// Arguments for later: stand-ins on the meta device hold no memory, and Python has never seen them.
struct Later {
  Values args;
  std::unordered_map<c10::TensorImpl*, Span> spans;
  std::vector<bool> outs;

  explicit Later(const Call& call) {
    ByTensor stand_ins;
    for (auto& arg : call.args)
      args.push_back(mapped(arg, [&](const at::Tensor& t) -> at::Tensor {
        if (!is_late(t)) return t.clone();
        auto& own = stand_ins[id(t)];
        if (!own.defined()) {
          own = at::empty({0}, at::TensorOptions().device(at::kMeta));
          spans.emplace(id(own), Span(t));
        }
        return own;
      }, at::Device(at::kCPU)));
    for (auto& argument : call.schema.arguments()) outs.push_back(argument.is_out());
  }
};

void copy_to(const Span& span, const at::Tensor& own) {
  auto target = span.on_cpu();
  // A batch norm in evaluation has statistics by its shapes, which the CPU does not write and nothing reads.
  if (own.numel() == 0) return;
  TORCH_CHECK(target.sizes() == own.sizes(), "the CPU gives ", own.sizes(), ", and meta said ", target.sizes());
  target.copy_(own);
}

/// Call the CPU's kernel, in the thread of a stream.
void run(const c10::OperatorHandle& op, const Later& later, const std::vector<std::optional<Span>>& fresh) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  ByTensor there;
  std::vector<std::pair<at::Tensor, Span>> given;
  // The CPU may resize an out= for a while: it gets other memory, unless the tensor is an input, too.
  for (bool out : {false, true})
    for (size_t k = 0; k < later.args.size(); k++)
      if (later.outs[k] == out)
        each(later.args[k], [&](const at::Tensor& t) {
          if (!t.is_meta() || there.count(id(t))) return;
          auto& span = later.spans.at(id(t));
          auto own = out ? at::empty({0}, at::TensorOptions().dtype(span.dtype).device(at::kCPU)) : span.on_cpu();
          if (out) given.emplace_back(own, span);
          there[id(t)] = own;
        });
  torch::jit::Stack stack;
  for (auto& arg : later.args)
    stack.push_back(mapped(arg, [&](const at::Tensor& t) { return t.is_meta() ? there.at(id(t)) : t; }));
  op.callBoxed(&stack);
  for (auto& [own, span] : given) copy_to(span, own);
  size_t k = 0;
  for (auto& result : stack)
    for (auto& t : flat(result)) {
      auto& span = fresh.at(k++);
      if (span && t.defined()) copy_to(*span, t);
    }
}

/// Do the work in the thread of the host, when the stream has got there.
Values run_here(Call& call, Queue* queue) {
  g_synced++;
  if (!on_clock()) launch(queue, call.told(), call.uses, [] {});
  host_waits(queue);
  ByTensor there, back;
  torch::jit::Stack stack;
  for (auto& arg : call.args)
    stack.push_back(mapped(arg, [&](const at::Tensor& t) -> at::Tensor {
      if (!is_late(t)) return t;
      auto& own = there[id(t)];
      if (!own.defined()) {
        own = Span(t).on_cpu();
        back[id(own)] = t;
      }
      return own;
    }, at::Device(at::kCPU)));
  call.op.callBoxed(&stack);
  for (auto& [own, t] : back)
    if (!t.sizes().equals(own->sizes())) {  // an out= that did not fit
      at::native::resize_(t, own->sizes(), std::nullopt);
      t.copy_(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(own)).clone());
    }
  Values results;
  for (auto& result : stack)
    results.push_back(mapped(result, [&](const at::Tensor& t) -> at::Tensor {
      auto it = back.find(id(t));
      if (it != back.end()) return it->second;
      auto fresh = at::empty_strided(t.sizes(), t.strides(), t.options().device(call.device));
      Span span(fresh);
      if (!on_clock()) launch(queue, call.told() + " (result)", {{span.data, true}}, [span, t] { span.on_cpu().copy_(t); });
      return fresh;
    }));
  return results;
}

// ------------------------------------------------------------------------------------------------------------ results

/// What a call gives and costs, by what it is given: asking the meta device takes longer than launching on a GPU does.
struct Known {
  enum { FRESH = -1, VALUE = -2 };
  struct Result { long argument; std::vector<int64_t> sizes, strides; at::ScalarType dtype; IValue value; };
  std::vector<Result> results;
  double seconds;
};

std::shared_mutex& knowing() { static auto* m = new std::shared_mutex; return *m; }
std::unordered_map<std::string, Known>& known() { static auto* k = new std::unordered_map<std::string, Known>; return *k; }

/// Describe the arguments; nothing if there are some that this does not know.
std::optional<std::string> key_of(const Call& call, std::vector<at::Tensor>& tensors) {
  std::string key;
  key.reserve(256);
  bool known_shapes = true;
  auto add = [&](const auto& value) { key.append(reinterpret_cast<const char*>(&value), sizeof value); };
  auto add_tensor = [&](const at::Tensor& t) {
    auto seen = std::find_if(tensors.begin(), tensors.end(), [&](const at::Tensor& one) { return one.is_same(t); });
    key += 't';
    add(seen - tensors.begin());
    if (seen == tensors.end()) tensors.push_back(t);
    key += is_late(t) ? 'l' : 'c';
    known_shapes &= is_late(t) || (t.dim() == 0 && t.scalar_type() != at::kBool);  // Those of indices depend on data.
    key += id(t)->is_wrapped_number() ? 'w' : '-';
    key += static_cast<char>(t.scalar_type());
    add(t.dim());
    for (auto size : t.sizes()) add(size);
    for (auto stride : t.strides()) add(stride);
  };
  const auto* schema = &call.schema;
  add(schema);
  key += on_clock() ? 'C' : 'W';
  key += static_cast<char>(at::typeMetaToScalarType(at::get_default_dtype()));
  for (auto& arg : call.args) {
    if (arg.isTensor()) {
      if (arg.toTensor().defined()) add_tensor(arg.toTensor()); else key += 'u';
    } else if (arg.isInt()) {
      key += 'i'; add(arg.toInt());
    } else if (arg.isDouble()) {
      key += 'd'; add(arg.toDouble());
    } else if (arg.isBool()) {
      key += arg.toBool() ? 'T' : 'F';
    } else if (arg.isNone() || arg.isGenerator()) {
      key += 'n';
    } else if (arg.isIntList()) {
      auto list = arg.toIntVector();
      key += 'I'; add(list.size());
      for (auto one : list) add(one);
    } else if (arg.isBoolList()) {
      auto list = arg.toBoolList();
      key += 'B'; add(list.size());
      for (bool one : list) key += one ? 'T' : 'F';
    } else if (arg.isDevice()) {
      key += 'D';
    } else if (arg.isString()) {
      key += 's'; key += arg.toStringRef(); key += '\0';
    } else if (arg.isTensorList()) {
      auto list = arg.toTensorVector();
      key += 'L'; add(list.size());
      for (auto& t : list) if (t.defined()) add_tensor(t); else key += 'u';
    } else {
      return std::nullopt;
    }
  }
  return known_shapes ? std::optional<std::string>(std::move(key)) : std::nullopt;
}

struct Found { Results results; double seconds = 0; };

/// Allocate the results of a call like an earlier one.
std::optional<Found> recall(const std::string& key, const std::vector<at::Tensor>& tensors, Call& call) {
  std::shared_lock<std::shared_mutex> lock(knowing());
  auto it = known().find(key);
  if (it == known().end()) return std::nullopt;
  Found found{{}, it->second.seconds};
  auto& [values, fresh] = found.results;
  for (auto& one : it->second.results) {
    std::optional<Span> span;
    if (one.argument >= 0) values.push_back(tensors.at(one.argument));
    else if (one.argument == Known::VALUE) values.push_back(one.value);
    else {
      at::Tensor t = at::detail::empty_strided_generic(one.sizes, one.strides, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), one.dtype);
      if (!on_clock()) {
        if (t.numel()) call.uses.push_back({t.data_ptr(), true});
        span = Span(t);
      }
      values.push_back(t);
    }
    if (values.back().isTensor()) fresh.push_back(span);
  }
  return found;
}

void learn(const std::string& key, const std::vector<at::Tensor>& tensors, const Values& results, double seconds) {
  Known now{{}, seconds};
  for (auto& value : results) {
    if (value.isInt() || (value.isTensor() && !value.toTensor().defined())) {
      now.results.push_back({Known::VALUE, {}, {}, at::kFloat, value});
      continue;
    }
    if (!value.isTensor()) return;
    auto& t = value.toTensor();
    auto argument = std::find_if(tensors.begin(), tensors.end(), [&](const at::Tensor& one) { return one.is_same(t); });
    if (argument == tensors.end() && !is_late(t)) return;
    now.results.push_back({argument == tensors.end() ? long(Known::FRESH) : argument - tensors.begin(), t.sizes().vec(), t.strides().vec(), t.scalar_type(), {}});
  }
  std::unique_lock<std::shared_mutex> lock(knowing());
  known().emplace(key, std::move(now));
}

/// Find the uses of a call, and allocate its results. None if the meta device does not know them.
std::optional<Found> find_results(Call& call) {
  std::vector<at::Tensor> tensors;
  auto key = key_of(call, tensors);
  if (key)
    if (auto found = recall(*key, tensors, call)) {
      if (!on_clock()) call.find_uses();
      return found;
    }
  std::vector<std::vector<int64_t>> sizes;
  for (auto& t : tensors) sizes.push_back(t.sizes().vec());
  auto shapes = shapes_of(call);
  call.find_uses();  // Behind the shapes: an out= that has got its size there, as in arange, has memory only now.
  if (!shapes) return std::nullopt;
  Found found{allocate(*shapes, call)};
  if (on_clock()) {
    std::vector<at::Tensor> given, taken;
    for (auto& value : found.results.values)
      for (auto& t : flat(value)) if (t.defined()) given.push_back(t);
    for (auto& t : tensors) if (is_late(t)) taken.push_back(t);
    found.seconds = seconds_of(call.name, taken, given);
  }
  bool resized = false;
  for (size_t k = 0; k < tensors.size(); k++) resized |= !tensors[k].sizes().equals(sizes[k]);
  if (key && !resized) learn(*key, tensors, found.results.values, found.seconds);
  return found;
}

// ----------------------------------------------------------------------------------------------------------- fallback

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto base = stack->end() - static_cast<long>(op.schema().arguments().size());
  Call call(op, Values(base, stack->end()));
  call.find_device();
  const c10::DeviceGuard guard(call.device);
  auto* queue = current(t_device);
  const bool attends = starts(call.name, "_scaled_dot_product");  // gives the lengths of sequences as well
  const bool asynchronous = (attends || call.gives_tensors()) && !EAGER;

  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (!on_clock() || !asynchronous) call.draw();
  std::optional<Found> found;
  if (asynchronous) found = find_results(call); else call.find_uses();
  Values results;
  if (!found) {
    results = run_here(call, queue);
  } else if (on_clock()) {
    g_launches++;
    queue->spend("kernel", found->seconds);
    results = std::move(found->results.values);
  } else {
    auto later = std::make_shared<Later>(call);  // Sizes may have changed, so the spans come last.
    launch(queue, call.told(), call.uses, [op, later, fresh = std::move(found->results.fresh)] { run(op, *later, fresh); });
    results = std::move(found->results.values);
  }
  stack->erase(stack->end() - static_cast<long>(call.args.size()), stack->end());
  for (auto& result : results) stack->push_back(std::move(result));
}

// ------------------------------------------------------------------------------------- operators that backends must have

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true) || p == 0) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {at::mul(at::mul(input, mask), p == 1 ? 0. : 1 / (1 - p)), mask};
}

// Convolutions have operators of their own for backends outside of PyTorch; here they are those of the CPU.
void as_another(const char* name, torch::jit::Stack* stack) {
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), stack);
}
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) { as_another("aten::convolution", stack); }
void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  // grad, input, weight, stride, padding, dilation, transposed, output_padding, groups, mask; the CPU's has the sizes of
  // the bias behind the weight.
  auto base = stack->end() - 10;
  auto weight = (base + 2)->toTensor();
  const bool transposed = (base + 6)->toBool();
  int64_t channels = transposed ? weight.size(1) * (base + 8)->toInt() : weight.size(0);
  stack->insert(base + 3, IValue(std::vector<int64_t>{channels}));
  as_another("aten::convolution_backward", stack);
}

/// On the clock attention is one kernel, as on a GPU; computed, it is what the CPU has.
int64_t attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                  std::optional<double>, bool) {
  return static_cast<int64_t>(on_clock() ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", native_dropout);
  m.impl("_scaled_dot_product_fused_attention_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace

}  // namespace late

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &late::attention)
}
