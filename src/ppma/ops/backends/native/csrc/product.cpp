#include "product.h"

namespace ppma {

template void product(const Left&, const Right&, int64_t, int64_t, int64_t, const Store&);
template void product(const Left&, const Right&, int64_t, int64_t, int64_t, const ScoreStore&);
template void product(const Left&, const Right&, int64_t, int64_t, int64_t, const ScaledStore&);
template void product(const Left&, const Right&, int64_t, int64_t, int64_t, const MixedStore&);

}  // namespace ppma
