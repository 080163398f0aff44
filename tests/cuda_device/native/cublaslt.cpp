// cublasLt's stand-in: handles, descriptors, heuristics and Matmul.
//
// It supports what the engine may use, and refuses the rest with CUBLAS_STATUS_NOT_SUPPORTED and a reason. Where the
// documentation states a rule (alignment, workspace, types that go together), breaking it is refused, also where a card
// would let it pass.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <mutex>
#include <set>
#include <string>

#include "extension.h"
#include "gemm.h"

namespace {

enum Status { kSuccess = 0, kNotInitialized = 1, kAllocFailed = 3, kInvalidValue = 7, kExecutionFailed = 13, kNotSupported = 15 };

using gemm::Type;

struct Object {
  enum Kind { kHandle, kDesc, kLayout, kPreference } kind;
};
struct Handle : Object {};
struct Desc : Object {
  int compute_type, scale_type;
  int pointer_mode = 0, transpose_a = 0, transpose_b = 0, transpose_c = 0;
  unsigned epilogue = 1;
  uint64_t bias = 0;
  int bias_type = -1;
};
struct Layout : Object {
  int type, order = 0;
  uint64_t rows, columns;
  int64_t ld;
  int batch = 1;
  int64_t batch_offset = 0;
};
struct Preference : Object {
  uint64_t workspace = 0;
  unsigned alignment[4] = {256, 256, 256, 256};  // a, b, c, d
};
// What our algorithms hold in cublasLtMatmulAlgo_t.
struct Algo {
  uint64_t magic;
  uint64_t number, workspace;
  unsigned alignment[4];
  uint64_t rest[3];
};
static_assert(sizeof(Algo) == 64);
constexpr uint64_t kAlgoMagic = 0x736f6674616c676f;
struct HeuristicResult {
  Algo algo;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

std::mutex registry;
std::set<Object*> objects;

template <class T>
int create(T** out, T* object, Object::Kind kind) {
  object->kind = kind;
  std::lock_guard lock(registry);
  objects.insert(object);
  cuda_device_count_live("cublasLt", 1);
  *out = object;
  return kSuccess;
}

template <class T>
T* get(const void* handle, Object::Kind kind) {
  std::lock_guard lock(registry);
  auto at = objects.find((Object*)handle);
  return at != objects.end() && (*at)->kind == kind ? (T*)*at : nullptr;
}

template <class T>
int destroy(void* handle, Object::Kind kind) {
  T* object = get<T>(handle, kind);
  if (!object) return kInvalidValue;
  std::lock_guard lock(registry);
  objects.erase(object);
  delete object;
  cuda_device_count_live("cublasLt", -1);
  return kSuccess;
}

__attribute__((format(printf, 2, 3))) int refuse(int status, const char* format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  int start = snprintf(text, sizeof text, "cublasLt: ");
  vsnprintf(text + start, sizeof text - start, format, arguments);
  va_end(arguments);
  cuda_device_refused(status, text);
  return status;
}

int enter(const char* name) {
  bool any = false;
  int code = cuda_device_enter(name, &any);
  if (!code || !any) return code;
  return code == 2 ? kAllocFailed : kExecutionFailed;
}

bool known_type(int cuda_type, Type* type) {
  if (cuda_type != 0 && cuda_type != 2 && cuda_type != 14) return false;
  *type = cuda_type == 0 ? Type::kF32 : cuda_type == 2 ? Type::kF16 : Type::kBf16;
  return true;
}

// The product that the descriptors describe, but for its data.
int describe(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d, gemm::Product* out) {
  // 68: 32F, 69: pedantic, 74, 75, 77: 32F with faster, less exact products, which are exact here.
  bool fast = desc.compute_type == 74 || desc.compute_type == 75 || desc.compute_type == 77;
  if ((desc.compute_type != 68 && desc.compute_type != 69 && !fast) || desc.scale_type != 0)
    return refuse(kNotSupported, "compute type %d with scale type %d", desc.compute_type, desc.scale_type);
  if (desc.pointer_mode) return refuse(kNotSupported, "pointer mode %d, only host pointers", desc.pointer_mode);
  if (desc.transpose_c) return refuse(kNotSupported, "a transposed C");
  if (desc.transpose_a > 1 || desc.transpose_b > 1) return refuse(kNotSupported, "conjugate transposes");
  for (const Layout* layout : {&a, &b, &c, &d}) {
    if (layout->order) return refuse(kNotSupported, "order %d, only columns (0)", layout->order);
    if (!layout->rows || !layout->columns) return refuse(kInvalidValue, "an empty matrix");
    if (layout->ld < (int64_t)layout->rows)
      return refuse(kInvalidValue, "leading dimension %lld of %llu rows", (long long)layout->ld,
                    (unsigned long long)layout->rows);
    if (layout->batch != d.batch || layout->batch < 1) return refuse(kInvalidValue, "batch counts differ");
  }
  gemm::Product& product = *out;
  if (!known_type(a.type, &product.a.type) || !known_type(b.type, &product.b.type) || !known_type(c.type, &product.c.type) ||
      !known_type(d.type, &product.d.type))
    return refuse(kNotSupported, "types %d, %d, %d, %d: only fp32, fp16 and bf16", a.type, b.type, c.type, d.type);
  if (a.type != b.type || c.type != d.type || (d.type != a.type && d.type != 0))
    return refuse(kNotSupported, "types %d, %d to %d, %d do not go together", a.type, b.type, c.type, d.type);
  if (fast && a.type != 0) return refuse(kNotSupported, "compute type %d wants fp32 matrices", desc.compute_type);
  product.transpose_a = desc.transpose_a;
  product.transpose_b = desc.transpose_b;
  product.m = desc.transpose_a ? a.columns : a.rows;
  product.k = desc.transpose_a ? a.rows : a.columns;
  product.n = desc.transpose_b ? b.rows : b.columns;
  uint64_t k = desc.transpose_b ? b.columns : b.rows;
  if (k != product.k || d.rows != product.m || d.columns != product.n || c.rows != d.rows || c.columns != d.columns)
    return refuse(kInvalidValue, "shapes: op(A) %llu x %llu, op(B) %llu x %llu, C %llu x %llu, D %llu x %llu",
                  (unsigned long long)product.m, (unsigned long long)product.k, (unsigned long long)k,
                  (unsigned long long)product.n, (unsigned long long)c.rows, (unsigned long long)c.columns,
                  (unsigned long long)d.rows, (unsigned long long)d.columns);
  product.a.ld = a.ld;
  product.b.ld = b.ld;
  product.c.ld = c.ld;
  product.d.ld = d.ld;
  switch (desc.epilogue) {
    case 1: case 4: product.activation = gemm::Activation::kNone; break;
    case 2: case 6: product.activation = gemm::Activation::kRelu; break;
    case 32: case 36: product.activation = gemm::Activation::kGelu; break;
    default: return refuse(kNotSupported, "epilogue %u", desc.epilogue);
  }
  // The type that the bias has where nobody says otherwise is D's, and no other one is supported for these types.
  product.bias_type = product.d.type;
  if (desc.epilogue & 4 && desc.bias_type != -1 && desc.bias_type != d.type)
    return refuse(kNotSupported, "bias of type %d for a result of type %d", desc.bias_type, d.type);
  return kSuccess;
}

// Bytes from a matrix's first element to behind its last one.
uint64_t extent(const Layout& layout, Type type) {
  return ((layout.columns - 1) * layout.ld + layout.rows) * gemm::size_of(type);
}

// The algorithms of the heuristic, the best one first. The first wants memory, as the best ones of the card do.
constexpr uint64_t kWorkspace = 64 * 1024;
constexpr int kAlgos = 3;

Algo algo(int number, const Preference& preference) {
  Algo algo = {};
  algo.magic = kAlgoMagic;
  algo.number = number;
  algo.workspace = number == 0 ? kWorkspace : 0;
  memcpy(algo.alignment, preference.alignment, sizeof algo.alignment);
  return algo;
}

template <class T>
int set_field(T* field, const void* from, size_t bytes) {
  if (!from || bytes != sizeof(T)) return refuse(kInvalidValue, "an attribute of %zu bytes, it has %zu", bytes, sizeof(T));
  memcpy(field, from, sizeof(T));
  return kSuccess;
}

}  // namespace

#define API(name) extern "C" __attribute__((visibility("default"))) int name
#define CALL(name) \
  if (int status = enter(#name)) return status
#define FIND(type, variable, handle)                     \
  type* variable = get<type>(handle, Object::k##type);   \
  if (!variable) return refuse(kInvalidValue, "%s: no such object", __func__)

extern "C" __attribute__((visibility("hidden"))) int software_device_stub(const char* name) {
  if (int status = enter(name)) return status;
  return refuse(kNotSupported, "%s is not implemented by the software device", name);
}

EXPORT size_t cublasLtGetVersion() { return 130000; }
EXPORT size_t cublasLtGetCudartVersion() { return 13000; }

API(cublasLtCreate)(Handle** handle) {
  CALL(cublasLtCreate);
  return create(handle, new Handle, Object::kHandle);
}
API(cublasLtDestroy)(void* handle) {
  CALL(cublasLtDestroy);
  return destroy<Handle>(handle, Object::kHandle);
}

API(cublasLtMatmulDescCreate)(Desc** out, int compute_type, int scale_type) {
  CALL(cublasLtMatmulDescCreate);
  Desc* desc = new Desc;
  desc->compute_type = compute_type;
  desc->scale_type = scale_type;
  return create(out, desc, Object::kDesc);
}
API(cublasLtMatmulDescDestroy)(void* handle) {
  CALL(cublasLtMatmulDescDestroy);
  return destroy<Desc>(handle, Object::kDesc);
}
API(cublasLtMatmulDescSetAttribute)(void* handle, int attribute, const void* from, size_t bytes) {
  CALL(cublasLtMatmulDescSetAttribute);
  FIND(Desc, desc, handle);
  switch (attribute) {
    case 0: return set_field(&desc->compute_type, from, bytes);
    case 1: return set_field(&desc->scale_type, from, bytes);
    case 2: return set_field(&desc->pointer_mode, from, bytes);
    case 3: return set_field(&desc->transpose_a, from, bytes);
    case 4: return set_field(&desc->transpose_b, from, bytes);
    case 5: return set_field(&desc->transpose_c, from, bytes);
    case 7: return set_field(&desc->epilogue, from, bytes);
    case 8: return set_field(&desc->bias, from, bytes);
    case 26: return set_field(&desc->bias_type, from, bytes);
    default: return refuse(kNotSupported, "MatmulDesc attribute %d", attribute);
  }
}

API(cublasLtMatrixLayoutCreate)(Layout** out, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  CALL(cublasLtMatrixLayoutCreate);
  Layout* layout = new Layout;
  layout->type = type;
  layout->rows = rows;
  layout->columns = columns;
  layout->ld = ld;
  return create(out, layout, Object::kLayout);
}
API(cublasLtMatrixLayoutDestroy)(void* handle) {
  CALL(cublasLtMatrixLayoutDestroy);
  return destroy<Layout>(handle, Object::kLayout);
}
API(cublasLtMatrixLayoutSetAttribute)(void* handle, int attribute, const void* from, size_t bytes) {
  CALL(cublasLtMatrixLayoutSetAttribute);
  FIND(Layout, layout, handle);
  switch (attribute) {
    case 0: return set_field(&layout->type, from, bytes);
    case 1: return set_field(&layout->order, from, bytes);
    case 2: return set_field(&layout->rows, from, bytes);
    case 3: return set_field(&layout->columns, from, bytes);
    case 4: return set_field(&layout->ld, from, bytes);
    case 5: return set_field(&layout->batch, from, bytes);
    case 6: return set_field(&layout->batch_offset, from, bytes);
    default: return refuse(kNotSupported, "MatrixLayout attribute %d", attribute);
  }
}

API(cublasLtMatmulPreferenceCreate)(Preference** out) {
  CALL(cublasLtMatmulPreferenceCreate);
  return create(out, new Preference, Object::kPreference);
}
API(cublasLtMatmulPreferenceDestroy)(void* handle) {
  CALL(cublasLtMatmulPreferenceDestroy);
  return destroy<Preference>(handle, Object::kPreference);
}
API(cublasLtMatmulPreferenceSetAttribute)(void* handle, int attribute, const void* from, size_t bytes) {
  CALL(cublasLtMatmulPreferenceSetAttribute);
  FIND(Preference, preference, handle);
  uint32_t ignored;
  switch (attribute) {
    case 1: return set_field(&preference->workspace, from, bytes);
    case 0: case 3: return set_field(&ignored, from, bytes);
    case 5: case 6: case 7: case 8: return set_field(&preference->alignment[attribute - 5], from, bytes);
    default: return refuse(kNotSupported, "MatmulPreference attribute %d", attribute);
  }
}

API(cublasLtMatmulAlgoGetHeuristic)(void* handle, void* desc_handle, void* a_handle, void* b_handle, void* c_handle,
                                    void* d_handle, void* preference_handle, int requested, HeuristicResult* results,
                                    int* returned) {
  CALL(cublasLtMatmulAlgoGetHeuristic);
  FIND(Handle, lt, handle);
  (void)lt;
  FIND(Desc, desc, desc_handle);
  FIND(Layout, a, a_handle);
  FIND(Layout, b, b_handle);
  FIND(Layout, c, c_handle);
  FIND(Layout, d, d_handle);
  FIND(Preference, preference, preference_handle);
  if (requested < 1 || !results || !returned) return refuse(kInvalidValue, "%d algorithms asked for", requested);
  gemm::Product product = {};
  *returned = 0;
  if (int status = describe(*desc, *a, *b, *c, *d, &product)) return status;
  for (int number = 0; number < kAlgos && *returned < requested; number++) {
    Algo candidate = algo(number, *preference);
    if (candidate.workspace > preference->workspace) continue;
    results[(*returned)++] = {candidate, candidate.workspace, kSuccess, 1.0f, {}};
  }
  return kSuccess;
}

API(cublasLtMatmul)(void* handle, void* desc_handle, const float* alpha, const void* a_data, void* a_handle,
                    const void* b_data, void* b_handle, const float* beta, const void* c_data, void* c_handle, void* d_data,
                    void* d_handle, const Algo* chosen, void* workspace, size_t workspace_bytes, void* stream) {
  CALL(cublasLtMatmul);
  FIND(Handle, lt, handle);
  (void)lt;
  FIND(Desc, desc, desc_handle);
  FIND(Layout, a, a_handle);
  FIND(Layout, b, b_handle);
  FIND(Layout, c, c_handle);
  FIND(Layout, d, d_handle);
  gemm::Product product = {};
  if (int status = describe(*desc, *a, *b, *c, *d, &product)) return status;
  if (!alpha || !beta || !a_data || !b_data || !d_data) return refuse(kInvalidValue, "a null pointer");
  if (!c_data && *beta != 0) return refuse(kInvalidValue, "beta without C");
  product.alpha = *alpha;
  product.beta = *beta;

  Algo used = chosen ? *chosen : algo(1, Preference());
  if (used.magic != kAlgoMagic) return refuse(kInvalidValue, "an algorithm that no heuristic gave");
  if (used.workspace > workspace_bytes || (used.workspace && !workspace))
    return refuse(kInvalidValue, "a workspace of %zu bytes, the algorithm needs %llu", workspace_bytes,
                  (unsigned long long)used.workspace);
  if ((uint64_t)workspace % 256) return refuse(kInvalidValue, "a workspace that is not aligned to 256 bytes");

  const Layout* layouts[] = {a, b, c, d};
  gemm::Matrix* matrices[] = {&product.a, &product.b, &product.c, &product.d};
  void* data[] = {(void*)a_data, (void*)b_data, (void*)(product.beta != 0 ? c_data : nullptr), d_data};
  for (int i = 0; i < 4; i++) {
    matrices[i]->data = data[i];
    if ((uint64_t)data[i] % used.alignment[i])
      return refuse(kNotSupported, "%c is not aligned to the %u bytes that the heuristic was asked for", "ABCD"[i],
                    used.alignment[i]);
    if ((uint64_t)data[i] % gemm::size_of(matrices[i]->type)) return refuse(kInvalidValue, "%c is misaligned", "ABCD"[i]);
  }
  if (data[2] == d_data && (c->ld != d->ld || c->batch_offset != d->batch_offset))
    return refuse(kInvalidValue, "C and D share memory with different layouts");
  if (desc->epilogue & 4) {
    if (!desc->bias || desc->bias % 16) return refuse(kInvalidValue, "a bias that is null or not aligned to 16 bytes");
    product.bias = (const void*)desc->bias;
  }
  for (int i = 0; i < 3; i++) {
    // D = C is the one overlap that is allowed.
    if (!data[i] || (i == 2 && data[i] == d_data)) continue;
    uint64_t first = (uint64_t)data[i], last = first + extent(*layouts[i], matrices[i]->type);
    uint64_t d_first = (uint64_t)d_data, d_last = d_first + extent(*d, product.d.type);
    if (first < d_last && d_first < last) return refuse(kInvalidValue, "%c overlaps D", "ABCD"[i]);
  }

  Layout copies[] = {*a, *b, *c, *d};
  bool has_c = data[2] != nullptr;
  int code = cuda_device_enqueue(stream, [=]() mutable -> int {
    if (used.workspace) {
      if (!cuda_device_holds((uint64_t)workspace, used.workspace)) {
        refuse(kExecutionFailed, "the workspace is not memory of the device");
        return 700;
      }
      // Nobody's data lies there; a part is enough to show it.
      if (cuda_device_poisons()) memset(workspace, 0xff, 4096);
    }
    if (product.bias && !cuda_device_holds((uint64_t)product.bias, product.m * gemm::size_of(product.bias_type))) {
      refuse(kExecutionFailed, "the bias is not memory of the device");
      return 700;
    }
    gemm::Matrix* matrices[] = {&product.a, &product.b, &product.c, &product.d};
    for (int batch = 0; batch < copies[3].batch; batch++) {
      for (int i = 0; i < 4; i++) {
        if (i == 2 && !has_c) continue;
        if (!cuda_device_holds((uint64_t)matrices[i]->data, extent(copies[i], matrices[i]->type))) {
          refuse(kExecutionFailed, "%c reaches beyond memory of the device", "ABCD"[i]);
          return 700;
        }
      }
      gemm::run(product);
      for (int i = 0; i < 4; i++)
        if (matrices[i]->data)
          matrices[i]->data = (char*)matrices[i]->data + copies[i].batch_offset * (int64_t)gemm::size_of(matrices[i]->type);
    }
    return 0;
  });
  return code ? kExecutionFailed : kSuccess;
}
